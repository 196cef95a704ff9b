"""Hand what is asked and answered to the folder of captures, as it goes by."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.captures import Capture, CaptureFolder
from app.logs import request_id
from app.proxy.outlet import WRITE_NOW

# Of an answer; a request is bounded by server.max_body.
_MOST_BYTES = 8 << 20


class CaptureMiddleware:
    """Pure ASGI: keeps bodies of POST requests, never headers; not those of operators."""

    def __init__(self, app: ASGIApp, *, folder: CaptureFolder) -> None:
        self._app = app
        self._folder = folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].startswith("/admin"):
            await self._app(scope, receive, send)
            return
        tape = _Tape()

        async def receive_and_keep() -> Message:
            message = await receive()
            tape.asked(message)
            return message

        async def send_and_keep(message: Message) -> None:
            tape.answered(message)
            await send(message)

        try:
            await self._app(_without_shortcut(scope), receive_and_keep, send_and_keep)
        finally:
            self._folder.put(tape.capture(scope["path"]))


def _without_shortcut(scope: Scope) -> Scope:
    """Of the same request, but every part of the answer comes by here."""
    extensions = {name: value for name, value in scope.get("extensions", {}).items() if name != WRITE_NOW}
    return {**scope, "extensions": extensions}


class _Tape:
    def __init__(self) -> None:
        self._request = bytearray()
        self._response = bytearray()
        self._status: int | None = None
        self._is_cut = False

    def asked(self, message: Message) -> None:
        if message["type"] == "http.request":
            self._keep(self._request, message.get("body", b""))

    def answered(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            self._keep(self._response, message.get("body", b""))

    def capture(self, path: str) -> Capture:
        return Capture(request_id.get(), path, self._status, bytes(self._request), bytes(self._response), self._is_cut)

    def _keep(self, tape: bytearray, part: bytes) -> None:
        room = _MOST_BYTES - len(tape)
        tape.extend(part[:room])
        self._is_cut |= len(part) > room
