"""The W3C trace context of a request: taken from its head, passed on, kept in its record."""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from dataclasses import dataclass

# version-trace-parent-flags; later versions may carry more behind these (Trace Context §4.3).
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_LONGEST_STATE = 512
_SAMPLED = 1

# Ids need only be their own; one from the system costs a call into the kernel.
_random = random.Random()


@dataclass(frozen=True, slots=True)
class TraceContext:
    """``span_id`` is our own span, or while we have none the caller's; ``parent_id`` is None where the trace begins."""

    trace_id: int
    span_id: int
    parent_id: int | None = None
    is_sampled: bool = True
    state: str = ""

    def headers(self) -> dict[str, str]:
        """What the next server on the way is sent."""
        parent = f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"
        return {"traceparent": parent} | ({"tracestate": self.state} if self.state else {})


trace_context: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def outgoing_headers() -> dict[str, str] | None:
    """The headers for a server that is asked within this request; None without a trace."""
    context = trace_context.get()
    return None if context is None else context.headers()


def continued(parent: str, state: str, *, with_span: bool) -> TraceContext | None:
    """The trace of a caller, with a span of our own or without; None for a header that is not valid."""
    found = _PARENT.fullmatch(parent.strip())
    if found is None:
        return None
    trace_id, parent_id, flags = (int(part, 16) for part in found.groups())
    kept = state if len(state) <= _LONGEST_STATE and state.isascii() and state.isprintable() else ""
    span_id = _new_span_id() if with_span else parent_id
    return TraceContext(trace_id, span_id, parent_id, bool(flags & _SAMPLED), kept)


def begun() -> TraceContext:
    """A trace that begins here."""
    return TraceContext(_random.getrandbits(128) or 1, _new_span_id())


def _new_span_id() -> int:
    return _random.getrandbits(64) or 1
