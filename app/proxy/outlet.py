"""What goes out to one client: begun once, kept alive in silence, watched for one who stops reading."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import Scope, Send

Headers = list[tuple[bytes, bytes]]

WriteNow = Callable[[bytes], bool]
"""Write a part of an answer that has begun, if its client keeps up; False, and nothing is written, if not."""

WRITE_NOW = "llama_gateway.write_now"
"""The server's extension of ASGI by which parts pass every layer at once; who wants to see them takes it away."""

# A comment of server-sent events: every client of OpenAI's API passes over it.
_COMMENT = b": keep-alive\n\n"


class Outlet:
    """The sending half of one exchange; ``begun`` means that the status has gone out and cannot be changed."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        # Sends a part without waiting; False, and nothing is sent, where that cannot be.
        self.write_now: WriteNow = scope.get("extensions", {}).get(WRITE_NOW, _never)
        self._sending_since: float | None = None
        self.begun = False

    async def begin(self, headers: Headers) -> None:
        """Send status 200 and the headers, unless that has been done."""
        if not self.begun:
            # Set before the first await, so that a keep-alive cannot begin a second time.
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part; waits while the client does not read."""
        self._sending_since = time.monotonic()
        await self._send(_body(body, more=more))
        self._sending_since = None

    async def keep_alive(self, headers: Headers) -> None:
        """Tell the client, and whoever stands between, that the silence is no death."""
        await self.begin(headers)
        await self._send(_body(_COMMENT, more=True))

    def stalled_seconds(self) -> float:
        """How long the client has left a part unread, 0 when it keeps up."""
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since


def _body(body: bytes, *, more: bool) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _never(_: bytes) -> bool:
    return False
