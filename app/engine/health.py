"""Ask an engine whether it is ready."""

from __future__ import annotations

from types import TracebackType

import httpx

from app.engine.endpoint import Endpoint

_PROBE_TIMEOUT_SECONDS = 2.0


class HealthProbe:
    """``/health`` of one engine; the only route that answers while a model loads. Use it as ``async with``."""

    def __init__(self, endpoint: Endpoint, *, timeout_seconds: float = _PROBE_TIMEOUT_SECONDS) -> None:
        socket = None if endpoint.socket is None else str(endpoint.socket)
        # verify: there is no TLS here, and reading the certificate store takes longer than a small model.
        transport = httpx.AsyncHTTPTransport(uds=socket, verify=False)
        self._client = httpx.AsyncClient(
            transport=transport, base_url=endpoint.base_url, trust_env=False, timeout=timeout_seconds
        )

    async def __aenter__(self) -> HealthProbe:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ready(self) -> bool:
        """True for 200; False while it loads (503), does not listen yet, or does not answer in time."""
        try:
            response = await self._client.get("/health")
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK

    async def answers(self) -> bool:
        """True for any answer at all within the time."""
        try:
            await self._client.get("/health")
        except httpx.HTTPError:
            return False
        return True
