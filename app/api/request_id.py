"""Give every request an id, in the answer and in the log."""

from __future__ import annotations

import random
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.logs import request_id
from app.trace_context import TraceContext, begun, continued, trace_context

Headers = list[tuple[bytes, bytes]]

# An id need not be unguessable, only its own; one from the system costs a call into the kernel.
_random = random.Random()
_ACCEPTABLE = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class RequestIdMiddleware:
    """Pure ASGI: takes the client's ``x-request-id`` when it is harmless, else makes one.

    The client's trace is taken up as well; with ``traces`` every request has a span of ours in it.
    """

    def __init__(self, app: ASGIApp, *, traces: bool = False) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        named, parent = _client_ids(scope["headers"])
        identity = named or b"%032x" % _random.getrandbits(128)
        token = request_id.set(identity.decode())
        is_traced = parent is not None or self._traces
        trace_token = trace_context.set(self._trace(parent, scope["headers"])) if is_traced else None

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                # OpenAI's name and Anthropic's.
                message["headers"] = [*message["headers"], (b"x-request-id", identity), (b"request-id", identity)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            request_id.reset(token)
            if trace_token is not None:
                trace_context.reset(trace_token)

    def _trace(self, parent: bytes | None, headers: Headers) -> TraceContext | None:
        state = b",".join(value for name, value in headers if name == b"tracestate").decode("latin-1")
        context = continued((parent or b"").decode("latin-1"), state, with_span=self._traces)
        return begun() if context is None and self._traces else context


def _client_ids(headers: Headers) -> tuple[bytes | None, bytes | None]:
    """The client's ``x-request-id`` and ``traceparent``."""
    named = parent = None
    for name, value in headers:
        if name == b"x-request-id":
            if _ACCEPTABLE.fullmatch(value):
                named = value
        elif name == b"traceparent":
            parent = value
    return named, parent
