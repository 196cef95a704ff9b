"""Texts or token lists as a field of a body holds them: one or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import InvalidValue
from app.protocol.fields import MAX_INTEGER

Prompt = str | list[int]
"""A text, or the tokens of one."""


def prompts_of(document: Mapping[str, Any], name: str, *, most: int) -> tuple[Prompt, ...]:
    """The field ``name``: a string, an array of strings, an array of tokens, or an array of such arrays.

    Raises InvalidValue for anything else, for more than ``most`` of them, and for an empty one.
    """
    value = document.get(name)
    if isinstance(value, str) or _is_tokens(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise InvalidValue(f"'{name}' must be a string, an array of strings, or arrays of tokens.", param=name)
    if len(value) > most:
        raise InvalidValue(f"'{name}' has {len(value)} entries; at most {most} go into one request.", param=name)
    return tuple(_prompt(entry, name if len(value) == 1 else f"{name}[{index}]") for index, entry in enumerate(value))


def _prompt(value: Any, where: str) -> Prompt:
    if not isinstance(value, str) and not _is_tokens(value):
        raise InvalidValue(
            f"'{where}' must be a string or a non-empty array of token numbers from 0 to {MAX_INTEGER}.", param=where
        )
    if not value:
        raise InvalidValue(f"'{where}' must not be empty.", param=where)
    return value  # type: ignore[no-any-return]  # checked above, which the type checker cannot follow


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        # A bool is an int in Python; the engine would wrap an integer over 32 bits.
        and all(type(token) is int and 0 <= token <= MAX_INTEGER for token in value)
    )
