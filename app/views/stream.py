"""The live page as server-sent events: what has changed, as often as the boards are drawn, until the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import orjson
from starlette.types import Receive, Scope, Send

from app.errors import GatewayError
from app.views.broadcast import Board, Broadcaster
from app.views.scene import Audience

_SILENCE_SECONDS = 15.0
_STALL_SECONDS = 30.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # nginx would otherwise collect the stream before it passes it on.
    (b"x-accel-buffering", b"no"),
]


class LiveResponse:
    """An ASGI response for one watcher.

    ``audience`` is asked again before each frame, since a reload may have revoked the key: it raises GatewayError.
    """

    def __init__(self, broadcaster: Broadcaster, audience: Callable[[], Audience]) -> None:
        self._broadcaster = broadcaster
        self._audience = audience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Race the frames against the client's leaving."""
        frames = asyncio.create_task(self._send_frames(send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait([frames, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (frames, gone):
                task.cancel()
            await asyncio.gather(frames, gone, return_exceptions=True)
        if not frames.cancelled():
            # A client that does not read is let go: the server closes what has not ended.
            with suppress(TimeoutError):
                frames.result()

    async def _send_frames(self, send: Send) -> None:
        audience = self._audience()
        with self._broadcaster.watch(audience) as board:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            last = await self._send_board(send, board, after=0)
            while await self._changed(send):
                if self._is_still(audience):
                    last = await self._send_board(send, board, after=last)
                    continue
                break
        await _write(send, b"event: end\ndata: {}\n\n", more=False)

    async def _changed(self, send: Send) -> bool:
        """Wait for the next frame with a sign of life in between; False when there will be none."""
        while not self._broadcaster.is_over:
            try:
                async with asyncio.timeout(_SILENCE_SECONDS):
                    await self._broadcaster.change()
                break
            except TimeoutError:
                await _write(send, b": \n\n")
        return not self._broadcaster.is_over

    def _is_still(self, audience: Audience) -> bool:
        try:
            return self._audience() == audience
        except GatewayError:
            return False

    async def _send_board(self, send: Send, board: Board, *, after: int) -> int:
        if changed := board.since(after):
            document = {"operator": board.audience.is_operator, "models": board.models(), "regions": changed}
            await _write(send, b"data: " + orjson.dumps(document) + b"\n\n")
        return board.frame


async def _write(send: Send, body: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(_STALL_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
