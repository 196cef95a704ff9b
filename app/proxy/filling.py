"""The work of one request to fill in the middle: put together from whole tokens, then generated like any text.

llama-server's own route keeps of a prefix and a suffix only what fits a batch, and says nothing.
"""

from __future__ import annotations

from app.auth import ApiKey
from app.backends import Backend
from app.config import ModelConfig
from app.errors import GatewayError, UnsupportedEndpoint, UpstreamFailed
from app.protocol import InfillRequest, ask_infill, error_event
from app.protocol.infill import MARKS
from app.proxy.generation import Generation
from app.proxy.outlet import Headers, Outlet
from app.proxy.parts import Parts
from app.proxy.preferences import Preferences


class Filling:
    """Answers one request to fill in the middle."""

    def __init__(
        self, parts: Parts, request: InfillRequest, *, model: ModelConfig, key: ApiKey, preferences: Preferences
    ) -> None:
        self._parts = parts
        self._request = request
        self._model = model
        self._key = key
        self._preferences = preferences
        self._generation: Generation | None = None

    async def run(self, outlet: Outlet) -> None:
        """Make tokens of it, then admit, wait and answer; raises GatewayError."""
        async with self._parts.supervisor.use(self._model) as backend, backend.counter.in_time():
            tokens = await self._tokens(backend)
        self._generation = Generation(
            self._parts,
            ask_infill(self._request.with_tokens(tokens)),
            model=self._model,
            key=self._key,
            preferences=self._preferences,
        )
        await self._generation.run(outlet)

    def silence_headers(self) -> Headers | None:
        """The head of the stream while nothing of the answer has gone out."""
        return None if self._generation is None else self._generation.silence_headers()

    def failure(self, error: GatewayError) -> bytes:
        """The error as an event."""
        return error_event(error) if self._generation is None else self._generation.failure(error)

    def account(self, outcome: str, error: GatewayError | None) -> None:
        """It has ended."""
        if self._generation is not None:
            self._generation.account(outcome, error)
            return
        self._parts.metrics.requests.labels(self._model.id, "infill", outcome).inc()
        if outcome == "client_gone":
            self._parts.metrics.client_disconnects.inc()

    async def _tokens(self, backend: Backend) -> list[int]:
        """Prefix and suffix between the model's marks, as llama.cpp orders them; raises UnsupportedEndpoint."""
        before, between, after = await self._marks(backend)
        opening = await _tokenize(backend, "", add_special=True)
        prefix = await _tokenize(backend, self._request.prefix)
        suffix = await _tokenize(backend, self._request.suffix)
        return [*opening[:1], before, *prefix, between, *suffix, after]

    async def _marks(self, backend: Backend) -> tuple[int, int, int]:
        for names in MARKS:
            marks = [await _tokenize(backend, name, parse_special=True) for name in names]
            if all(len(mark) == 1 for mark in marks):
                (before,), (between,), (after,) = marks
                return before, between, after
        raise UnsupportedEndpoint(
            f"The model {self._model.id!r} was not trained to fill in the middle; choose one for code.", param="model"
        )


async def _tokenize(
    backend: Backend, text: str, *, add_special: bool = False, parse_special: bool = False
) -> list[int]:
    document = {"content": text, "add_special": add_special, "parse_special": parse_special}
    answer = await backend.query("/tokenize", document)
    try:
        return [int(token) for token in answer["tokens"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UpstreamFailed("The engine's tokens cannot be read.") from error
