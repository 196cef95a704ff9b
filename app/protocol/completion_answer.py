"""What goes back for a completion: the engine's own stream, or its chunks put together."""

from __future__ import annotations

from typing import Any

import orjson

from app.protocol.ask import Ask, ChatStream
from app.protocol.completion import CompletionRequest
from app.protocol.sse import SSESplitter, event_data
from app.protocol.usage import Usage

# An engine that is given several prompts may begin with this, which no client can read.
_NO_CHUNK = b"data: null\n\n"


class CompletionStream(ChatStream):
    """OpenAI's stream of completions is the engine's own too, but for an empty event."""

    def feed(self, body: bytes) -> bytes:
        """The same; within a text it would be written with its line ends escaped."""
        return body.replace(_NO_CHUNK, b"")


class CompletionAnswer:
    """Aggregates ``text_completion`` chunks into one ``text_completion``."""

    def __init__(self) -> None:
        self._splitter = SSESplitter()
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises EventTooLong, or ValueError for what is no chunk."""
        for event in self._splitter.feed(body):
            data = event_data(event)
            if data and data.strip() != b"[DONE]":
                self._read(orjson.loads(data))

    def body(self, usage: Usage) -> bytes:
        """The whole answer as JSON, in the order of the prompts."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return orjson.dumps(self._head | {"choices": choices, "usage": usage.document()})

    def _read(self, chunk: Any) -> None:
        if chunk is None:
            return
        try:
            for key in ("id", "object", "created", "model", "system_fingerprint"):
                if key in chunk:
                    self._head.setdefault(key, chunk[key])
            for part in chunk.get("choices") or []:
                self._add(part)
        except (TypeError, AttributeError) as error:
            raise ValueError("the engine sent an event that is not a chunk") from error

    def _add(self, part: dict[str, Any]) -> None:
        index = int(part.get("index") or 0)
        choice = self._choices.setdefault(index, {"index": index, "text": "", "logprobs": None, "finish_reason": None})
        choice["text"] += part.get("text") or ""
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]


def ask_completion(request: CompletionRequest) -> Ask:
    """A request of OpenAI's legacy API."""
    return Ask(request, "completions", lambda _: CompletionStream(), lambda _: CompletionAnswer())
