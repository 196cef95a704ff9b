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


class MessageAnswer:
    """An Answer: the same blocks that MessageStream writes, in one document."""

    def __init__(self, *, stops: frozenset[str], shows_thinking: bool = True) -> None:
        self._stops = stops
        self._shows_thinking = shows_thinking
        self._reader = DeltaReader()
        self._blocks: list[dict[str, Any]] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._ending = Ending("end_turn")

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises UpstreamFailed."""
        for delta in self._reader.read(body):
            if delta.reasoning:
                block = self._enter({"type": "thinking", "thinking": "", "signature": SIGNATURE})
                block["thinking"] += delta.reasoning if self._shows_thinking else ""
            if delta.text:
                self._enter({"type": "text", "text": ""})["text"] += delta.text
            for call in delta.calls:
                self._add_call(call)
            if delta.finish_reason:
                self._ending = Ending.of(delta, self._stops, called=bool(self._calls))

    def body(self, usage: Usage) -> bytes:
        """The message; raises UpstreamFailed for a call that cannot be made."""
        message = message_document(identity=self._reader.id, model=self._reader.model)
        message |= {"content": self._content(), "usage": usage_document(usage)}
        return orjson.dumps(
            message | {"stop_reason": self._ending.stop_reason, "stop_sequence": self._ending.stop_sequence}
        )

    def _enter(self, empty: dict[str, Any]) -> dict[str, Any]:
        if not self._blocks or self._blocks[-1]["type"] != empty["type"]:
            self._blocks.append(empty)
        return self._blocks[-1]

    def _add_call(self, delta: CallDelta) -> None:
        call = self._calls.get(delta.place)
        if call is None:
            call = self._calls[delta.place] = {"type": "tool_use", "id": "", "name": "", "input": ""}
            self._blocks.append(call)
        call["id"] = call["id"] or delta.id
        call["name"] = call["name"] or delta.name
        call["input"] += delta.arguments

    def _content(self) -> list[dict[str, Any]]:
        """The blocks; a call that was cut off is left out, so that nobody makes it by mistake."""
        for place, call in self._calls.items():
            call["id"] = tool_use_id(call["id"], message_id=self._reader.id, place=place)
        return [_whole(block) for block in self._blocks if not self._ending.is_cut or _is_complete(block)]


def _is_complete(block: dict[str, Any]) -> bool:
    return block["type"] != "tool_use" or is_whole(block["input"])


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    return block | {"input": parse_input(block["input"])} if block["type"] == "tool_use" else block
