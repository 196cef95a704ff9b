"""The engine's chat stream, read: what each of its events adds to the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from app.errors import UpstreamFailed
from app.protocol.sse import EventTooLong, SSESplitter, event_data

_NO_LOGPROBS: Mapping[str, Any] = {}


class CallDelta(NamedTuple):
    """A part of a tool call; ``place`` counts the calls of the answer from 0 in the order of their appearance."""

    place: int
    id: str
    name: str
    arguments: str


class Delta(NamedTuple):
    """What one event adds; ``stopping_word`` is the word that ended the answer, where the engine says which."""

    reasoning: str
    text: str
    calls: tuple[CallDelta, ...]
    finish_reason: str | None
    stopping_word: str | None
    logprobs: Sequence[Any] = ()


class DeltaReader:
    """Reads the stream of an answer with one choice; ``id`` and ``model`` are known after the first event."""

    def __init__(self) -> None:
        self._splitter = SSESplitter()
        self._places = _CallPlaces()
        self.id = ""
        self.model = ""

    def read(self, body: bytes) -> list[Delta]:
        """What the events in ``body`` add; raises UpstreamFailed for what is no chunk."""
        try:
            found = [self._delta(event) for event in self._events(body)]
        except EventTooLong as error:
            raise _unreadable(str(error)) from error
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise _unreadable("it sent an event that is not a chunk") from error
        return [delta for delta in found if delta is not None]

    def _events(self, body: bytes) -> list[bytes]:
        # What the meter hands on are whole events.
        if not self._splitter.pending and body.endswith(b"\n\n") and b"\r" not in body:
            return body[:-2].split(b"\n\n")
        return self._splitter.feed(body)

    def _delta(self, event: bytes) -> Delta | None:
        # The engine's own events have one line; the parser passes over the blank ones behind it.
        data = event[6:] if event.startswith(b"data: {") else event_data(event)
        if not data or data.strip() == b"[DONE]":
            return None
        chunk = orjson.loads(data)
        if not self.id:
            self.id, self.model = str(chunk.get("id") or ""), str(chunk.get("model") or "")
        if not chunk.get("choices"):
            return None
        choice = chunk["choices"][0]
        delta = choice.get("delta") or {}
        calls, finish_reason = delta.get("tool_calls"), choice.get("finish_reason")
        return Delta(
            delta.get("reasoning_content") or "",
            delta.get("content") or "",
            tuple(map(self._places.read, calls)) if calls else (),
            finish_reason,
            _stopping_word(chunk, choice) if finish_reason else None,
            (choice.get("logprobs") or _NO_LOGPROBS).get("content") or (),
        )


def _stopping_word(chunk: dict[str, Any], choice: dict[str, Any]) -> str | None:
    """llama-server says it when it is asked to be verbose, vLLM by itself."""
    word = (chunk.get("__verbose") or {}).get("stopping_word") or choice.get("stop_reason")
    return word if isinstance(word, str) else None


class _CallPlaces:
    """Tells the calls apart by what engines send: an index, an id, both, once or each time."""

    def __init__(self) -> None:
        self._by_index: dict[int, int] = {}
        self._by_id: dict[str, int] = {}
        self._ids: list[str] = []

    def read(self, call: dict[str, Any]) -> CallDelta:
        """One entry of ``tool_calls``."""
        index, identity = call.get("index"), str(call.get("id") or "")
        function = call.get("function") or {}
        place = self._place(index, identity)
        if index is not None:
            self._by_index[index] = place
        if identity and not self._ids[place]:
            self._ids[place] = identity
            self._by_id[identity] = place
        return CallDelta(place, identity, function.get("name") or "", function.get("arguments") or "")

    def _place(self, index: int | None, identity: str) -> int:
        if identity in self._by_id:
            return self._by_id[identity]
        last = len(self._ids) - 1 if self._ids else None
        place = last if index is None else self._by_index.get(index)
        if place is None or (identity and self._ids[place]):
            # A second id under one index is another call, whatever the index says.
            self._ids.append("")
            return len(self._ids) - 1
        return place


def _unreadable(why: str) -> UpstreamFailed:
    return UpstreamFailed(f"The engine's answer cannot be read: {why}.", streamed=True)
