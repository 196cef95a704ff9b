"""The body of a request for text as an engine gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def streamed_body(fields: Mapping[str, Any], *, max_tokens: int, slot: int | None, **asked: Any) -> bytes:
    """Always a stream with usage and progress, always a limit; ``asked`` is the prompt under its name.

    The engine cancels a non-streaming request late after its client left, a stream at its next write.
    """
    return orjson.dumps(
        {
            **fields,
            **({} if slot is None else {"id_slot": slot}),
            **asked,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
    )
