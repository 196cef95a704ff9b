"""The items of an answer, grown from the engine's stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from app.protocol.delta import CallDelta, Delta

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class Item(ABC):
    """One item of the output at ``place``; it grows by pieces of text and is a document at any time."""

    __slots__ = ("id", "pieces", "place")
    prefix = ""

    def __init__(self, identity: str, place: int) -> None:
        self.id = f"{self.prefix}_{identity}{place:04x}"
        self.place = place
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)

    @abstractmethod
    def document(self, status: str) -> dict[str, Any]:
        """The item as the API has it; an item in progress is shown empty."""


class Message(Item):
    """What the model says."""

    __slots__ = ("logprobs",)
    prefix = "msg"

    def __init__(self, identity: str, place: int) -> None:
        super().__init__(identity, place)
        self.logprobs: list[Any] = []

    def part(self, text: str) -> dict[str, Any]:
        """Its one part."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def document(self, status: str) -> dict[str, Any]:
        """A message of the assistant."""
        content = [] if status == IN_PROGRESS else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class Reasoning(Item):
    """What the model thinks; no summary is made of it."""

    __slots__ = ()
    prefix = "rs"

    def part(self, text: str) -> dict[str, Any]:
        """Its one part."""
        return {"type": "reasoning_text", "text": text}

    def document(self, status: str) -> dict[str, Any]:
        """A reasoning item."""
        content = [] if status == IN_PROGRESS else [self.part(self.text)]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class Call(Item):
    """A function that the model wants called; its text are the arguments."""

    __slots__ = ("call_id", "name")
    prefix = "fc"

    def __init__(self, identity: str, place: int, call_id: str, name: str) -> None:
        super().__init__(identity, place)
        self.call_id = call_id or f"call_{identity}{place:04x}"
        self.name = name

    def document(self, status: str) -> dict[str, Any]:
        """A function call."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "" if status == IN_PROGRESS else self.text,
        }


class Listener(Protocol):
    """Who wants to know how the output grows."""

    def opened(self, item: Item) -> None:
        """A new item is there, still empty."""

    def grew(self, item: Item, piece: str, logprobs: Sequence[Any]) -> None:
        """A piece came to it."""

    def closed(self, item: Item, status: str) -> None:
        """Nothing more will come to it."""


class Output:
    """The items in the order of their appearance.

    A text is closed when something else begins. Calls stay open until the end, since their pieces may come in turns.
    """

    def __init__(self, identity: str, listener: Listener | None = None) -> None:
        self._identity = identity
        self._listener = listener
        self._items: list[Item] = []
        self._closed: dict[int, str] = {}
        self._text: Item | None = None
        self._calls: dict[int, Call] = {}
        # Calls whose name has not come yet: nothing can be said of them before.
        self._unnamed: dict[int, list[CallDelta]] = {}
        self._last: Item | None = None
        self.finish_reason: str | None = None
        self.reasoning_pieces = 0

    def add(self, delta: Delta) -> None:
        """What one event of the engine adds."""
        if delta.reasoning:
            self.reasoning_pieces += 1
            self._grow(self._open_text(Reasoning), delta.reasoning, ())
        if delta.text:
            self._grow(self._open_text(Message), delta.text, delta.logprobs)
        for call in delta.calls:
            self._add_call(call)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def close(self) -> None:
        """The end: only the item that grew last can have been cut short. There is at least an empty message."""
        if not self._items and not self._unnamed:
            self._open_text(Message)
        for place in list(self._unnamed):
            self._open_call(place, name="")
        for item in self._items:
            is_cut = item is self._last and self.finish_reason == "length"
            self._close(item, INCOMPLETE if is_cut else COMPLETED)

    def documents(self) -> list[dict[str, Any]]:
        """All items; those still open are incomplete."""
        return [item.document(self._closed.get(item.place, INCOMPLETE)) for item in self._items]

    def _open_text(self, kind: type[Message] | type[Reasoning]) -> Item:
        if type(self._text) is kind:
            return self._text
        self._close_text()
        self._text = self._append(kind(self._identity, len(self._items)))
        return self._text

    def _close_text(self) -> None:
        if self._text is not None:
            self._close(self._text, COMPLETED)
            self._text = None

    def _add_call(self, delta: CallDelta) -> None:
        call = self._calls.get(delta.place)
        if call is not None:
            self._grow(call, delta.arguments, ())
            return
        self._unnamed.setdefault(delta.place, []).append(delta)
        if delta.name:
            self._open_call(delta.place, delta.name)

    def _open_call(self, place: int, name: str) -> None:
        self._close_text()
        waiting = self._unnamed.pop(place)
        call_id = next((delta.id for delta in waiting if delta.id), "")
        call = self._calls[place] = Call(self._identity, len(self._items), call_id, name)
        self._append(call)
        for delta in waiting:
            self._grow(call, delta.arguments, ())

    def _append(self, item: Item) -> Item:
        self._items.append(item)
        if self._listener is not None:
            self._listener.opened(item)
        return item

    def _grow(self, item: Item, piece: str, logprobs: Sequence[Any]) -> None:
        if not piece:
            return
        self._last = item
        item.pieces.append(piece)
        if logprobs and isinstance(item, Message):
            item.logprobs.extend(logprobs)
        if self._listener is not None:
            self._listener.grew(item, piece, logprobs)

    def _close(self, item: Item, status: str) -> None:
        if item.place in self._closed:
            return
        self._closed[item.place] = status
        if self._listener is not None:
            self._listener.closed(item, status)
