"""What is known of a request when it has ended, for whoever keeps or passes on such records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.trace_context import TraceContext


@dataclass(slots=True)
class RequestRecord:
    """One request; times in seconds, ``ended_at`` Unix time, speeds in tokens per second by the engine's own clock,
    ``busy_slots`` how many of the model's slots worked on average while this one wrote.

    It has no field for what was asked or answered, so that no log can hold it. Not frozen, since it is made once per
    request and a frozen one costs three times as much.
    """

    request_id: str
    key: str
    model: str
    endpoint: str
    outcome: str
    error: str | None
    ended_at: float
    duration_seconds: float
    load_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    busy_slots: float = 1.0
    trace: TraceContext | None = None

    def document(self) -> dict[str, Any]:
        """The record as JSON; times in milliseconds."""
        return {
            "at": round(self.ended_at, 3),
            "id": self.request_id,
            "trace": None if self.trace is None else f"{self.trace.trace_id:032x}",
            "key": self.key,
            "model": self.model,
            "endpoint": self.endpoint,
            "outcome": self.outcome,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "load_ms": _milliseconds(self.load_seconds),
            "queue_ms": _milliseconds(self.queue_seconds),
            "prefill_ms": _milliseconds(self.prefill_seconds),
            "decode_ms": _milliseconds(self.decode_seconds),
            "total_ms": _milliseconds(self.duration_seconds),
            "prompt_tokens_per_second": _rounded(self.prompt_tokens_per_second),
            "generation_tokens_per_second": _rounded(self.generation_tokens_per_second),
        }


Observer = Callable[[RequestRecord], None]
"""Is told of every request that has ended, on the event loop's thread; must neither wait nor raise."""


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
