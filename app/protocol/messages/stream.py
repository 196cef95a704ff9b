"""The engine's stream as Anthropic's events."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from app.errors import GatewayError, UpstreamFailed
from app.protocol.delta import CallDelta, Delta, DeltaReader
from app.protocol.messages.document import (
    SIGNATURE,
    Ending,
    is_whole,
    message_document,
    parse_input,
    tool_use_id,
    usage_document,
)
from app.protocol.messages.faults import error_document
from app.protocol.usage import Usage


def event(kind: str, document: dict[str, object]) -> bytes:
    """One server-sent event; ``kind`` is its name and the document's type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **document}))


class MessageStream:
    """A StreamRendering: ``message_start``, one block after the other, ``message_delta``, ``message_stop``.

    ``input_tokens`` is the exact count of the prompt, ``stops`` are the client's stop sequences.
    """

    def __init__(self, *, input_tokens: int, stops: frozenset[str], shows_thinking: bool = True) -> None:
        self._input_tokens = input_tokens
        self._stops = stops
        self._reader = DeltaReader()
        self._blocks = _Blocks(self._reader, shows_thinking=shows_thinking)
        self._has_begun = False
        self._ending = Ending("end_turn")

    def feed(self, body: bytes) -> bytes:
        """The events for a piece of the engine's stream; raises UpstreamFailed."""
        deltas = self._reader.read(body)
        if not deltas:
            return b""
        out = [] if self._has_begun else [self._begin()]
        for delta in deltas:
            self._blocks.add(delta, out)
            if delta.finish_reason:
                self._ending = Ending.of(delta, self._stops, called=self._blocks.has_called)
        return b"".join(out)

    def end(self, usage: Usage) -> bytes:
        """The last events; raises UpstreamFailed for a call that cannot be made."""
        out = [] if self._has_begun else [self._begin()]
        self._blocks.end(out, is_cut=self._ending.is_cut)
        reason = {"stop_reason": self._ending.stop_reason, "stop_sequence": self._ending.stop_sequence}
        out.append(event("message_delta", {"delta": reason, "usage": usage_document(usage)}))
        out.append(event("message_stop", {}))
        return b"".join(out)

    def failure(self, error: GatewayError) -> bytes:
        """An ``error`` event, without ``message_stop`` behind it."""
        return event("error", error_document(error))

    def _begin(self) -> bytes:
        self._has_begun = True
        message = message_document(identity=self._reader.id, model=self._reader.model)
        usage = usage_document(Usage(prompt_tokens=self._input_tokens))
        return event("message_start", {"message": message | {"usage": usage}})


class _Call:
    """A tool call as far as it has come."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self._parts: list[str] = []

    @property
    def arguments(self) -> str:
        """All of them so far."""
        return "".join(self._parts)

    def add(self, delta: CallDelta) -> None:
        self.id = self.id or delta.id
        self.name = self.name or delta.name
        self._parts.append(delta.arguments)


class _Blocks:
    """Writes blocks in their order: one is closed before the next begins, calls that come mixed wait for their turn."""

    def __init__(self, reader: DeltaReader, *, shows_thinking: bool) -> None:
        self._reader = reader
        self._shows_thinking = shows_thinking
        self._next = 0
        # Of the block that is open: its kind ("" for none), and what stands before a piece of it.
        self._kind = ""
        self._before = b""
        self._calls: dict[int, _Call] = {}
        # The call that was opened last, and all that were.
        self._current = -1
        self._written: set[int] = set()

    @property
    def has_called(self) -> bool:
        """Whether the model has called a tool."""
        return bool(self._calls)

    def add(self, delta: Delta, out: list[bytes]) -> None:
        """Write what a delta adds; raises UpstreamFailed."""
        if delta.reasoning:
            self._enter("thinking", out)
            if self._shows_thinking:
                self._piece(delta.reasoning, out)
        if delta.text:
            self._enter("text", out)
            self._piece(delta.text, out)
        for call in delta.calls:
            self._call(call, out)

    def end(self, out: list[bytes], *, is_cut: bool) -> None:
        """Write what still waits, and close; raises UpstreamFailed for a call that cannot be made."""
        self._go_on(out, at_the_end=True)
        if not is_cut:
            for call in self._calls.values():
                parse_input(call.arguments)
        self._close(out)

    def _call(self, delta: CallDelta, out: list[bytes]) -> None:
        call = self._calls.setdefault(delta.place, _Call())
        call.add(delta)
        if delta.place == self._current and self._kind == "tool_use":
            if delta.arguments:
                self._piece(delta.arguments, out)
        elif delta.place not in self._written:
            self._go_on(out)
        elif delta.arguments.strip():
            raise UpstreamFailed("The engine went on with a tool call that had ended.", streamed=True)

    def _go_on(self, out: list[bytes], *, at_the_end: bool = False) -> None:
        """Write the calls whose turn it is: those behind one that is whole."""
        for place in sorted(self._calls.keys() - self._written):
            call = self._calls[place]
            is_busy = self._kind == "tool_use" and not is_whole(self._calls[self._current].arguments)
            if not at_the_end and (is_busy or not call.name):
                return
            self._current = place
            self._written.add(place)
            self._open("tool_use", self._tool_use(place, call), "input_json_delta", "partial_json", out)
            if call.arguments:
                self._piece(call.arguments, out)

    def _tool_use(self, place: int, call: _Call) -> dict[str, object]:
        identity = tool_use_id(call.id, message_id=self._reader.id, place=place)
        return {"type": "tool_use", "id": identity, "name": call.name, "input": {}}

    def _enter(self, kind: str, out: list[bytes]) -> None:
        if self._kind == kind:
            return
        if kind == "text":
            self._open(kind, {"type": "text", "text": ""}, "text_delta", "text", out)
        else:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            self._open(kind, empty, "thinking_delta", "thinking", out)

    def _open(self, kind: str, block: Mapping[str, object], delta: str, field: str, out: list[bytes]) -> None:
        self._close(out)
        self._kind = kind
        out.append(event("content_block_start", {"index": self._next, "content_block": block}))
        # Written once, since everything but the piece is the same in each of its events.
        empty = event("content_block_delta", {"index": self._next, "delta": {"type": delta, field: ""}})
        self._before = empty.removesuffix(b'""}}\n\n')

    def _piece(self, text: str, out: list[bytes]) -> None:
        out.append(b"%b%b}}\n\n" % (self._before, orjson.dumps(text)))

    def _close(self, out: list[bytes]) -> None:
        if not self._kind:
            return
        if self._kind == "thinking":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            out.append(event("content_block_delta", {"index": self._next, "delta": signed}))
        out.append(event("content_block_stop", {"index": self._next}))
        self._kind = ""
        self._next += 1
