"""The work of one request to fill in the middle: put together from whole tokens, then generated like any text.

llama-server's own route keeps of a prefix and a suffix only what fits a batch, and says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.auth import ApiKey
from app.backends import Backend
from app.config import ModelConfig
from app.errors import GatewayError, UnsupportedEndpoint, UpstreamFailed
from app.protocol import InfillRequest, ask_infill, error_event
from app.protocol.infill import FILE_MARKS, MARKS, PROJECT_MARKS, Snippet
from app.proxy.generation import Generation
from app.proxy.outlet import Headers, Outlet
from app.proxy.parts import Parts
from app.proxy.preferences import Preferences

# Clients tell neither the project's name nor that of the file that is being written.
_NO_NAME = "-\n"


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
            ask_infill(self._request, tokens),
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
        others = await _others(backend, self._request.snippets) if self._request.snippets else []
        prefix = await _tokenize(backend, self._request.prefix)
        suffix = await _tokenize(backend, self._request.suffix)
        return [*opening[:1], *others, before, *prefix, between, *suffix, after]

    async def _marks(self, backend: Backend) -> tuple[int, int, int]:
        for names in MARKS:
            before, between, after = [await _mark(backend, (name,)) for name in names]
            if before is not None and between is not None and after is not None:
                return before, between, after
        raise UnsupportedEndpoint(
            f"The model {self._model.id!r} was not trained to fill in the middle; choose one for code.", param="model"
        )


async def _others(backend: Backend, snippets: Sequence[Snippet]) -> list[int]:
    """Snippets of other files, as the model was shown whole projects (arXiv:2409.12186), else each under a rule."""
    project, file = await _mark(backend, PROJECT_MARKS), await _mark(backend, FILE_MARKS)
    if file is None:
        texts = (f"\n\n--- {snippet.file} ---\n\n{snippet.text}" for snippet in snippets)
        return await _tokenize(backend, "".join(texts) + "\n\n------\n\n")
    tokens = [] if project is None else [project, *await _tokenize(backend, _NO_NAME)]
    for snippet in snippets:
        tokens += [file, *await _tokenize(backend, f"{snippet.file}\n{snippet.text}")]
    return [*tokens, file, *await _tokenize(backend, _NO_NAME)]


async def _mark(backend: Backend, names: Sequence[str]) -> int | None:
    """The token of the first of these that the model knows as one."""
    for name in names:
        tokens = await _tokenize(backend, name, parse_special=True)
        if len(tokens) == 1:
            return tokens[0]
    return None


async def _tokenize(
    backend: Backend, text: str, *, add_special: bool = False, parse_special: bool = False
) -> list[int]:
    document = {"content": text, "add_special": add_special, "parse_special": parse_special}
    answer = await backend.query("/tokenize", document)
    try:
        return [int(token) for token in answer["tokens"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UpstreamFailed("The engine's tokens cannot be read.") from error
