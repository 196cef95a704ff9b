"""One look at tokens or templates: outside the slots, few at a time, and not for long."""

from __future__ import annotations

import orjson

from app.backends import Backend
from app.config import ModelConfig
from app.errors import EngineGone, GatewayError
from app.protocol import Inspection
from app.proxy.outlet import Headers, Outlet
from app.proxy.parts import Parts

# Of the engine's answer these go out, nothing else.
_ANSWERED = frozenset({"tokens", "content", "prompt"})


class Inspector:
    """Answers one small question."""

    def __init__(self, parts: Parts, inspection: Inspection, *, model: ModelConfig) -> None:
        self._parts = parts
        self._inspection = inspection
        self._model = model
        self._backend: Backend | None = None

    async def run(self, outlet: Outlet) -> None:
        """Ask and answer; raises GatewayError."""
        try:
            answer = await self._ask()
        except EngineGone:
            # Nothing has begun: its successor can say it as well.
            await self._parts.supervisor.replaced(self._model, self._backend)
            answer = await self._ask()
        body = orjson.dumps({name: value for name, value in answer.items() if name in _ANSWERED})
        await outlet.begin(
            [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
        )
        await outlet.write(body, more=False)

    async def _ask(self) -> dict[str, object]:
        inspection = self._inspection
        async with self._parts.supervisor.use(self._model) as self._backend:
            counter = self._backend.counter
            counter.check(inspection.prompts, field=inspection.field)
            document = inspection.document(self._backend.abilities)
            async with counter.in_time():
                return await self._backend.query(inspection.route, document)

    def silence_headers(self) -> Headers | None:
        """None: the answer is a document with its length."""
        return None

    def failure(self, error: GatewayError) -> bytes:
        """Nothing: the answer begins when it is known."""
        return b""

    def account(self, outcome: str, error: GatewayError | None) -> None:
        """Count it."""
        self._parts.metrics.requests.labels(self._model.id, self._inspection.route.strip("/"), outcome).inc()
        if outcome == "client_gone":
            self._parts.metrics.client_disconnects.inc()
