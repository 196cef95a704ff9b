"""One count of a prompt: exact, outside the slots, so that it works while all of them are busy."""

from __future__ import annotations

from collections.abc import Callable

from app.backends import Backend
from app.config import ModelConfig
from app.errors import EngineGone, GatewayError
from app.protocol import ChatRequest, with_rounded_times
from app.proxy.outlet import Headers, Outlet
from app.proxy.parts import Parts


class Counting:
    """Answers one question for the tokens of a prompt; ``write`` puts the number into the words of the client's API.

    The counter of the model bounds how many are asked at once and for how long.
    """

    def __init__(
        self, parts: Parts, request: ChatRequest, *, model: ModelConfig, write: Callable[[int], bytes], endpoint: str
    ) -> None:
        self._parts = parts
        self._request = request
        self._model = model
        self._write = write
        self._endpoint = endpoint
        self._backend: Backend | None = None

    async def run(self, outlet: Outlet) -> None:
        """Count and answer; raises GatewayError."""
        if self._request.media:
            self._request = await self._parts.images.inlined(self._request)
        try:
            tokens = await self._count()
        except EngineGone:
            # Nothing has begun: its successor can say it as well.
            await self._parts.supervisor.replaced(self._model, self._backend)
            tokens = await self._count()
        body = self._write(tokens)
        await outlet.begin(
            [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
        )
        await outlet.write(body, more=False)

    async def _count(self) -> int:
        async with self._parts.supervisor.use(self._model) as self._backend:
            # As it would be sent.
            request, _ = self._request.adapted(self._backend.abilities)
            if self._model.round_prompt_times:
                request, _ = with_rounded_times(request)
            return await self._backend.counter.count(request)

    def silence_headers(self) -> Headers | None:
        """None: the answer is a document with its length."""
        return None

    def failure(self, error: GatewayError) -> bytes:
        """Nothing: the answer begins when it is known."""
        return b""

    def account(self, outcome: str, error: GatewayError | None) -> None:
        """Count it; how long answers take is told by those that generate."""
        self._parts.metrics.requests.labels(self._model.id, self._endpoint, outcome).inc()
        if outcome == "client_gone":
            self._parts.metrics.client_disconnects.inc()
