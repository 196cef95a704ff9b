"""Give every request an id, in the answer and in the log."""

from __future__ import annotations

import random
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.logs import request_id

# An id need not be unguessable, only its own; one from the system costs a call into the kernel.
_random = random.Random()
_ACCEPTABLE = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class RequestIdMiddleware:
    """Pure ASGI: takes the client's ``x-request-id`` when it is harmless, else makes one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = _client_id(scope["headers"]) or b"%032x" % _random.getrandbits(128)
        token = request_id.set(identity.decode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                # OpenAI's name and Anthropic's.
                message["headers"] = [*message["headers"], (b"x-request-id", identity), (b"request-id", identity)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            request_id.reset(token)


def _client_id(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"x-request-id" and _ACCEPTABLE.fullmatch(value):
            return value
    return None
