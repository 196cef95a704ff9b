"""One connection to an engine of our own, and the answer that comes over it.

aiohttp does this for every kind of server; what that takes per piece of a stream is in tests/bench/README.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpResponseParser

# So much of an answer may lie here unread before the engine is made to wait.
_MAX_UNREAD_BYTES = 1 << 18
_MAX_HEAD_BYTES = 64 << 10


Sink = Callable[[bytes], bool]
"""Takes bytes and returns True, or leaves them; must neither wait nor raise."""


class BrokenOff(ConnectionError):
    """The connection ended, or carried what is no HTTP, before the end of an answer."""


class Response:
    """An answer that comes: ``status`` once its head is there, its body in pieces as the engine wrote them."""

    __slots__ = ("_connection", "_loop", "_parts", "_problem", "_sink", "_unread_bytes", "_waiter", "status")

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        # Ours until the end of the answer; by then it may serve another.
        self._connection: Connection | None = connection
        self._loop = loop
        self._parts: list[bytes] = []
        self._unread_bytes = 0
        self._problem: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    async def head(self) -> None:
        """Until ``status`` is known; raises BrokenOff."""
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """What has come, after waiting for the first of it; empty at the end. Raises BrokenOff."""
        while not self._parts:
            if self._connection is None and self._problem is None:
                return b""
            await self._more()
        return self.read_nowait()

    async def read_all(self) -> bytes:
        """What is left of the body; raises BrokenOff."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def read_nowait(self) -> bytes:
        """What has come and was not read yet."""
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._unread_bytes = 0
        if self._connection is not None and self._connection.is_paused:
            self._connection.resume()
        return data

    def hand_to(self, sink: Sink) -> None:
        """Give ``sink`` each piece that comes while a reader waits; one that it does not take is read as any other.

        The reader need not be woken for what is taken, and having nothing in hand it cannot be overtaken.
        """
        self._sink = sink

    def at_eof(self) -> bool:
        """Whether the answer has ended and been read."""
        return self._connection is None and not self._parts

    def close(self) -> None:
        """Let go of it: before its end the connection is closed, by which the engine notices."""
        if self._connection is not None:
            self._connection.close()

    def begin(self, status: int) -> None:
        """The connection: the head is there."""
        self.status = status
        self._wake()

    def add(self, part: bytes) -> None:
        """The connection: the next piece of the body."""
        if self._sink is not None and self._waiter is not None and not self._parts and self._sink(part):
            return
        self._wake()
        self._parts.append(part)
        self._unread_bytes += len(part)
        if self._unread_bytes > _MAX_UNREAD_BYTES and self._connection is not None:
            self._connection.pause()

    def end(self, problem: str | None = None) -> None:
        """The connection: nothing more will come, because of ``problem`` if the answer is not whole."""
        self._connection = None
        self._problem = problem
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _more(self) -> None:
        if self._problem is not None:
            raise BrokenOff(self._problem)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """Carries one exchange after the other; ``on_idle`` is told when it can carry the next, ``on_lost`` of its end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.is_open = False
        self.is_paused = False
        self.idle_since = 0.0
        self._loop = loop
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._response: Response | None = None
        self._ends_with_connection = True
        self._head_bytes = 0

    def send(self, head: bytes, body: bytes) -> Response:
        """Write a request; the answer is awaited by its ``head``. Only when nothing else runs here."""
        assert self._transport is not None
        assert self._response is None
        response = self._response = Response(self, self._loop)
        self._ends_with_connection, self._head_bytes = True, 0
        self._transport.writelines((head, body))
        return response

    def close(self) -> None:
        """Close it, whatever runs; idempotent."""
        self.is_open = False
        if self._transport is not None:
            # Not close(): what an engine that hangs has not read of a request would keep it open.
            self._transport.abort()
        self._end("it was closed")

    def pause(self) -> None:
        """Let the engine wait."""
        if self._transport is not None and self.is_open and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self._transport is not None and self.is_open and self.is_paused:
            self.is_paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine."""
        response = self._response
        if response is None:
            # Nobody asked.
            self.close()
            return
        if not response.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError:
            self._end("what came is not HTTP")
            self.close()
            return
        if self._head_bytes > _MAX_HEAD_BYTES and not response.status:
            self._end("its head does not end")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone; an answer without a length ends by that."""
        self.is_open = False
        response = self._response
        if response is not None and response.status and self._ends_with_connection:
            self._end()
        else:
            self._end("it ended before the answer did")
        self._on_lost(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser: one header."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """The parser: the head is whole; one of 1xx only announces another."""
        status = self._parser.get_status_code()
        if self._response is not None and status >= 200:
            self._response.begin(status)

    def on_body(self, part: bytes) -> None:
        """The parser: a piece of the body."""
        if self._response is not None:
            self._response.add(part)

    def on_message_complete(self) -> None:
        """The parser: the answer is whole."""
        if self._response is None or not self._response.status:
            return
        self._end()
        if self.is_open and self._parser.should_keep_alive():
            # What has come of the answer may still be read, but by its reader alone.
            self.resume()
            self.idle_since = self._loop.time()
            self._on_idle(self)
        else:
            self.close()

    def _end(self, problem: str | None = None) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.end(problem)
