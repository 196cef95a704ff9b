"""Pieces of llama-server's chat stream, byte by byte as it writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

_COMMON = {"created": 1, "id": "chatcmpl-1", "model": "m", "object": "chat.completion.chunk"}
DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"finish_reason": finish_reason, "index": 0, "delta": delta}
    return b"data: " + orjson.dumps({"choices": [choice], **_COMMON, **more}) + b"\n\n"


def usage_chunk(*, prompt: int, completion: int, cached: int = 0) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    usage |= {"prompt_tokens_details": {"cached_tokens": cached}}  # type: ignore[dict-item]
    return b"data: " + orjson.dumps({"choices": [], **_COMMON, "usage": usage}) + b"\n\n"


def recorded(*deltas: dict[str, Any]) -> Iterator[bytes]:
    """The role chunk, then one for each delta."""
    yield chunk({"role": "assistant", "content": None})
    yield from (chunk(delta) for delta in deltas)
