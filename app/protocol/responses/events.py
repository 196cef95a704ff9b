"""Writes how an output grows as the events of the Responses API, numbered from 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from app.protocol.responses.output import IN_PROGRESS, Call, Item, Message, Reasoning

_CONTENT = b'"content_index":0,'
_DELTA_KINDS = {
    Message: ("response.output_text.delta", _CONTENT),
    Reasoning: ("response.reasoning_text.delta", _CONTENT),
    Call: ("response.function_call_arguments.delta", b""),
}


class EventWriter:
    """Collects the bytes of events; ``take`` hands them out."""

    def __init__(self) -> None:
        self._number = 0
        self._written: list[bytes] = []
        # What is the same in every delta of an item, up to its number.
        self._heads: dict[int, bytes] = {}

    def take(self) -> bytes:
        """What was written since the last time."""
        written = b"".join(self._written)
        self._written.clear()
        return written

    def write(self, kind: str, **fields: Any) -> None:
        """One event."""
        document = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._written.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document)))

    def opened(self, item: Item) -> None:
        """The item is added, and its part if it has one."""
        self._heads[item.place] = _delta_head(item)
        self.write("response.output_item.added", output_index=item.place, item=item.document(IN_PROGRESS))
        if isinstance(item, Message | Reasoning):
            self.write("response.content_part.added", **_place_in(item), part=item.part(""))

    def grew(self, item: Item, piece: str, logprobs: Sequence[Any]) -> None:
        """One delta: the event that there are many of, so that it is not made out as a document."""
        more = b',"logprobs":%b' % orjson.dumps(logprobs) if type(item) is Message else b""
        delta = orjson.dumps(piece)
        self._written.append(b'%b%d,"delta":%b%b}\n\n' % (self._heads[item.place], self._number, delta, more))
        self._number += 1

    def closed(self, item: Item, status: str) -> None:
        """The whole text once more, the part, the item."""
        text = item.text
        if isinstance(item, Message):
            self.write("response.output_text.done", **_place_in(item), text=text, logprobs=item.logprobs)
        elif isinstance(item, Reasoning):
            self.write("response.reasoning_text.done", **_place_in(item), text=text)
        elif isinstance(item, Call):
            place = {"item_id": item.id, "output_index": item.place}
            self.write("response.function_call_arguments.done", **place, name=item.name, arguments=text)
        if isinstance(item, Message | Reasoning):
            self.write("response.content_part.done", **_place_in(item), part=item.part(text))
        self.write("response.output_item.done", output_index=item.place, item=item.document(status))


def _place_in(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.place, "content_index": 0}


def _delta_head(item: Item) -> bytes:
    kind, content = _DELTA_KINDS[type(item)]
    head = f'event: {kind}\ndata: {{"type":"{kind}","item_id":"{item.id}","output_index":{item.place},'
    return head.encode() + content + b'"sequence_number":'
