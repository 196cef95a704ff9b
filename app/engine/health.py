"""Ask an engine whether it is ready."""

from __future__ import annotations

import asyncio
from contextlib import closing
from types import TracebackType

from app.engine.client import EngineClient
from app.engine.endpoint import Endpoint

_PROBE_TIMEOUT_SECONDS = 2.0


class HealthProbe:
    """``/health`` of one engine; the only route that answers while a model loads. Use it as ``async with``."""

    def __init__(self, endpoint: Endpoint, *, timeout_seconds: float = _PROBE_TIMEOUT_SECONDS) -> None:
        self._client = EngineClient(endpoint)
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> HealthProbe:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    async def ready(self) -> bool:
        """True for 200; False while it loads (503), does not listen yet, or does not answer in time."""
        return await self._status() == 200

    async def answers(self) -> bool:
        """True for any answer at all within the time."""
        return await self._status() is not None

    async def _status(self) -> int | None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                with closing(await self._client.get("/health")) as response:
                    await response.read_all()
                    return response.status
        except (TimeoutError, OSError):
            return None
