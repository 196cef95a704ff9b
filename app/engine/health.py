"""Ask an engine whether it is ready."""

from __future__ import annotations

from types import TracebackType

import aiohttp

from app.engine.endpoint import Endpoint

_PROBE_TIMEOUT_SECONDS = 2.0
# The engine closes a connection that is idle for 5 seconds, without a word.
_KEEPALIVE_SECONDS = 3.0


class HealthProbe:
    """``/health`` of one engine; the only route that answers while a model loads. Use it as ``async with``."""

    def __init__(self, endpoint: Endpoint, *, timeout_seconds: float = _PROBE_TIMEOUT_SECONDS) -> None:
        self._url = f"{endpoint.base_url}/health"
        connector = (
            aiohttp.TCPConnector(keepalive_timeout=_KEEPALIVE_SECONDS)
            if endpoint.socket is None
            else aiohttp.UnixConnector(path=str(endpoint.socket), keepalive_timeout=_KEEPALIVE_SECONDS)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        )

    async def __aenter__(self) -> HealthProbe:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ready(self) -> bool:
        """True for 200; False while it loads (503), does not listen yet, or does not answer in time."""
        return await self._status() == 200

    async def answers(self) -> bool:
        """True for any answer at all within the time."""
        return await self._status() is not None

    async def _status(self) -> int | None:
        try:
            async with self._session.get(self._url) as response:
                await response.read()
                return response.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
