"""Configurations that a test writes, by the fixture ``write``, and what is said of those that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.config import load_settings
from app.errors import ConfigError

Write = Callable[[str], Path]


def refusal_of(file: Path) -> str:
    """The message by which it is refused."""
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    return refused.value.message
