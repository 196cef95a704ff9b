"""Ask one engine of our own over HTTP/1.1, on connections that are kept between requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from app.engine.connection import Connection, Response
from app.engine.endpoint import Endpoint

# llama-server closes a connection that is idle for 5 s, without a word; ours must go first.
_KEPT_SECONDS = 3.0


class EngineClient:
    """As many connections as there are requests; those without one are used again, the last one first."""

    def __init__(self, endpoint: Endpoint, *, api_key: str = "") -> None:
        self.kept_seconds = _KEPT_SECONDS
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f" HTTP/1.1\r\nhost: engine\r\n{key}"
        self._all: set[Connection] = set()
        self._idle: deque[Connection] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def get(self, path: str) -> Response:
        """The answer, once its head has come; raises OSError, as reading it does."""
        return await self._ask(f"GET {path}{self._head}\r\n".encode(), b"")

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
        """The answer to a JSON body, once its head has come; raises OSError, as reading it does."""
        more = "" if headers is None else "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path}{self._head}content-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        return await self._ask(head.encode("latin-1"), body)

    def close(self) -> None:
        """Close all connections, whatever runs on them; idempotent."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._all):
            connection.close()
        self._idle.clear()

    async def _ask(self, head: bytes, body: bytes) -> Response:
        connection = self._kept() or await self._connect()
        response = connection.send(head, body)
        try:
            await response.head()
        except BaseException:
            connection.close()
            raise
        return response

    def _kept(self) -> Connection | None:
        oldest = self._loop.time() - self.kept_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        connection = Connection(self._loop, on_idle=self._keep, on_lost=self._all.discard)
        if self._endpoint.socket is not None:
            await self._loop.create_unix_connection(lambda: connection, str(self._endpoint.socket))
        else:
            await self._loop.create_connection(lambda: connection, "127.0.0.1", self._endpoint.port or 0)
        if self._is_closed:
            connection.close()
        if not connection.is_open:
            # Its end has been told already, and nobody would hear of it again.
            raise ConnectionError("the connection to the engine was closed at once")
        self._all.add(connection)
        return connection

    def _keep(self, connection: Connection) -> None:
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self.kept_seconds, self._close_old)

    def _close_old(self) -> None:
        """Those that were kept for too long; the oldest lie first."""
        self._sweep = None
        oldest = self._loop.time() - self.kept_seconds
        while self._idle and (self._idle[0].idle_since <= oldest or not self._idle[0].is_open):
            self._idle.popleft().close()
        if self._idle:
            self._sweep = self._loop.call_later(self._idle[0].idle_since - oldest, self._close_old)
