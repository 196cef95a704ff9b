"""Which messages of a conversation may go first, if the client has said that some may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def droppable(messages: Messages) -> tuple[tuple[int, ...], ...]:
    """Indexes that go together, oldest first.

    System messages and the last question stay, and of what came after it the last step. A turn goes as a whole, and
    so does a call of tools with its results: neither is of use without the other.
    """
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    turns = _groups(messages, range(last), starts=("user",))
    steps = _groups(messages, range(last + 1, len(messages)), starts=("assistant", "user"))
    return (*turns, *steps[:-1])


def _groups(messages: Messages, indexes: range, *, starts: tuple[str, ...]) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []
    for index in indexes:
        role = messages[index]["role"]
        if role == "system":
            continue
        if not groups or role in starts:
            groups.append((index,))
        else:
            groups[-1] = (*groups[-1], index)
    return groups


def without(messages: Sequence[dict[str, Any]], dropped: Sequence[int]) -> list[dict[str, Any]]:
    """The conversation without some of its messages."""
    gone = frozenset(dropped)
    return [message for index, message in enumerate(messages) if index not in gone]


def ranges(indexes: Sequence[int]) -> str:
    """``1-14,16``: the same in few letters."""
    spans: list[list[int]] = []
    for index in sorted(indexes):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
