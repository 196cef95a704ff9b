"""The numbered lines of the compliance checklist (reference engine-http.md §6.4): which test shows which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

_Test = TypeVar("_Test", bound=Callable[..., Any])


def lines(*numbers: int) -> Callable[[_Test], _Test]:
    """Marks a test as the one of these lines; one line alone runs with ``pytest -m "line(number=84)"``."""

    def mark(test: _Test) -> _Test:
        for number in numbers:
            test = pytest.mark.line(number=number)(test)
        return test

    return mark
