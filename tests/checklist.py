"""Which test shows which line of the checklist (reference engine-http.md §6.4) and which row of cases/reports.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

_Test = TypeVar("_Test", bound=Callable[..., Any])


def lines(*numbers: int) -> Callable[[_Test], _Test]:
    """Marks a test as the one of these lines; one line alone runs with ``pytest -m "line(number=84)"``."""
    return _marked(pytest.mark.line, numbers)


def rows(*numbers: int) -> Callable[[_Test], _Test]:
    """Marks a test as the one of these rows of cases/reports.md; alone with ``pytest -m "row(number=13)"``."""
    return _marked(pytest.mark.row, numbers)


def _marked(mark: pytest.MarkDecorator, numbers: Iterable[int]) -> Callable[[_Test], _Test]:
    def marked(test: _Test) -> _Test:
        for number in numbers:
            test = mark(number=number)(test)
        return test

    return marked
