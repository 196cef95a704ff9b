"""The engine's stream put together to one message."""

from __future__ import annotations

from typing import Any

import orjson

from app.protocol.delta import CallDelta, DeltaReader
from app.protocol.messages.document import (
    SIGNATURE,
    Ending,
    is_whole,
    message_document,
    parse_input,
    tool_use_id,
    usage_document,
)
from app.protocol.usage import Usage


class _Block:
    """A block as far as it has come: its kind and the pieces of its text, for a call those of its arguments."""

    def __init__(self, kind: str, place: int = -1) -> None:
        self.kind = kind
        self.place = place
        self.id = ""
        self.name = ""
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_complete(self) -> bool:
        """Whether it may stand in an answer that was cut off: any text may, a call only when it is whole."""
        return self.kind != "tool_use" or is_whole(self.text)

    def document(self, message_id: str) -> dict[str, Any]:
        """The block in the message; raises UpstreamFailed for a call that cannot be made."""
        if self.kind == "text":
            return {"type": "text", "text": self.text}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": self.text, "signature": SIGNATURE}
        identity = tool_use_id(self.id, message_id=message_id, place=self.place)
        return {"type": "tool_use", "id": identity, "name": self.name, "input": parse_input(self.text)}


class MessageAnswer:
    """An Answer: the same blocks that MessageStream writes, in one document."""

    def __init__(self, *, stops: frozenset[str], shows_thinking: bool = True) -> None:
        self._stops = stops
        self._shows_thinking = shows_thinking
        self._reader = DeltaReader()
        self._blocks: list[_Block] = []
        self._calls: dict[int, _Block] = {}
        self._ending = Ending("end_turn")

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises UpstreamFailed."""
        for delta in self._reader.read(body):
            if delta.reasoning:
                self._enter("thinking").append(delta.reasoning if self._shows_thinking else "")
            if delta.text:
                self._enter("text").append(delta.text)
            for call in delta.calls:
                self._add_call(call)
            if delta.finish_reason:
                self._ending = Ending.of(delta, self._stops, called=bool(self._calls))

    def body(self, usage: Usage) -> bytes:
        """The message, without a call that was cut off, so that nobody makes it by mistake.

        Raises UpstreamFailed for a call that cannot be made.
        """
        blocks = [block for block in self._blocks if not self._ending.is_cut or block.is_complete]
        return orjson.dumps(
            message_document(identity=self._reader.id, model=self._reader.model)
            | {
                "content": [block.document(self._reader.id) for block in blocks],
                "stop_reason": self._ending.stop_reason,
                "stop_sequence": self._ending.stop_sequence,
                "usage": usage_document(usage),
            }
        )

    def _enter(self, kind: str) -> list[str]:
        """The pieces of a block of this kind, a new one unless one is under way."""
        if not self._blocks or self._blocks[-1].kind != kind:
            self._blocks.append(_Block(kind))
        return self._blocks[-1].pieces

    def _add_call(self, delta: CallDelta) -> None:
        call = self._calls.get(delta.place)
        if call is None:
            call = self._calls[delta.place] = _Block("tool_use", delta.place)
            self._blocks.append(call)
        call.id = call.id or delta.id
        call.name = call.name or delta.name
        call.pieces.append(delta.arguments)
