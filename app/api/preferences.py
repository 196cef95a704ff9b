"""What a client may ask for in headers, beside the body that its SDK makes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from app.errors import InvalidValue
from app.proxy import Preferences
from app.scheduler import Urgency
from app.tokens import Overflow

_Choice = TypeVar("_Choice", bound=Enum)

_OVERFLOW = {choice.value: choice for choice in Overflow}
_PRIORITY = {choice.name.lower(): choice for choice in Urgency}


def preferences(headers: Mapping[str, str]) -> Preferences:
    """``x-context-overflow`` and ``x-priority``; raises InvalidValue."""
    return Preferences(
        overflow=_one_of(_OVERFLOW, headers, "x-context-overflow"),
        urgency=_one_of(_PRIORITY, headers, "x-priority"),
    )


def _one_of(choices: Mapping[str, _Choice], headers: Mapping[str, str], name: str) -> _Choice | None:
    value = headers.get(name)
    if value is not None and value.lower() not in choices:
        raise InvalidValue(f"The header {name} must be one of {', '.join(choices)}.", param=name)
    return None if value is None else choices[value.lower()]
