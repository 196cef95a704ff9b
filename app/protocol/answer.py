"""Put the chunks of a stream together to the answer that a client without streaming gets."""

from __future__ import annotations

from typing import Any

import orjson

from app.protocol.sse import SSESplitter, event_data
from app.protocol.usage import Usage


class ChatAnswer:
    """Aggregates ``chat.completion.chunk`` events into one ``chat.completion``."""

    def __init__(self) -> None:
        self._splitter = SSESplitter()
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def feed(self, chunk: bytes) -> None:
        """Add what the engine sent; raises EventTooLong, or ValueError for what is no chunk."""
        for event in self._splitter.feed(chunk):
            data = event_data(event)
            if data and data.strip() != b"[DONE]":
                self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            self._add(orjson.loads(data))
        except (TypeError, AttributeError) as error:
            raise ValueError("the engine sent an event that is not a chunk") from error

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices so far, in order."""
        return [self._choices[index] for index in sorted(self._choices)]

    def body(self, usage: Usage) -> bytes:
        """The whole answer as JSON."""
        document = self._head | {"object": "chat.completion", "choices": self.choices, "usage": usage.document()}
        return orjson.dumps(document)

    def _add(self, chunk: dict[str, Any]) -> None:
        for key in ("id", "created", "model", "system_fingerprint"):
            if key in chunk:
                self._head.setdefault(key, chunk[key])
        for part in chunk.get("choices") or []:
            self._add_choice(part)

    def _add_choice(self, part: dict[str, Any]) -> None:
        index = int(part.get("index") or 0)
        choice = self._choices.setdefault(
            index,
            {
                "index": index,
                "message": {"role": "assistant", "content": None},
                "logprobs": None,
                "finish_reason": None,
            },
        )
        _add_delta(choice["message"], part.get("delta") or {})
        if part.get("logprobs"):
            _extend_lists(choice, "logprobs", part["logprobs"])
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if value is None:
            continue
        if key == "tool_calls":
            for call in value:
                _add_tool_call(message.setdefault("tool_calls", []), call)
        elif key == "role":
            message["role"] = value
        elif isinstance(value, str):
            message[key] = (message.get(key) or "") + value
        else:
            message[key] = value


def _add_tool_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    index = int(delta.get("index", max(0, len(calls) - 1)))
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["type"] = delta.get("type") or call["type"]
    call["function"]["name"] = function.get("name") or call["function"]["name"]
    call["function"]["arguments"] += function.get("arguments") or ""


def _extend_lists(choice: dict[str, Any], key: str, part: dict[str, Any]) -> None:
    whole = choice[key] or {}
    for name, value in part.items():
        whole[name] = [*(whole.get(name) or []), *value] if isinstance(value, list) else value
    choice[key] = whole
