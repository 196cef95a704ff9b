"""Makes an exchange of each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from app.auth import ApiKey
from app.config import ModelCatalog, ModelConfig
from app.errors import UnsupportedEndpoint
from app.gguf import Kind
from app.images import Images
from app.metrics import Metrics
from app.protocol import Ask, ChatRequest, InfillRequest, Inspection, Question, checked
from app.proxy.counting import Counting
from app.proxy.exchange import ExchangeResponse, Patience, Work
from app.proxy.exchanges import Exchanges
from app.proxy.filling import Filling
from app.proxy.generation import Generation
from app.proxy.inspector import Inspector
from app.proxy.parts import Parts
from app.proxy.preferences import Preferences
from app.proxy.progress import Progress
from app.proxy.query import Query
from app.quota import Quota
from app.request_record import Observer
from app.scheduler import Scheduler
from app.supervisor import Supervisor

_NO_PREFERENCES = Preferences()
_SAYS: Mapping[Kind, str] = {
    Kind.CHAT: "writes text, use it with /v1/chat/completions; for vectors or ranking choose one of another kind",
    Kind.EMBEDDING: "makes embeddings only, use it with /v1/embeddings",
    Kind.RERANK: "ranks documents only, use it with /v1/rerank",
}


class Proxy:
    """The way from a parsed request to its answer; ``catalog`` is replaced at a reload."""

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        supervisor: Supervisor,
        scheduler: Scheduler,
        metrics: Metrics,
        quota: Quota,
        images: Images,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.catalog = catalog
        self.quota = quota
        self.patience = Patience()
        self.parts = Parts(supervisor, scheduler, metrics, quota, images, tuple(observers))
        self._exchanges = Exchanges()

    async def drain(self, seconds: float) -> None:
        """Refuse new exchanges, let the open ones end, and after ``seconds`` end them with an error."""
        await self._exchanges.drain(seconds)

    def progress(self) -> list[Progress]:
        """How far each open request for text is; asks nobody."""
        works = (exchange.work for exchange in self._exchanges)
        each = (work.progress() for work in works if isinstance(work, Generation))
        return [progress for progress in each if progress is not None]

    def model(self, name: str, key: ApiKey, kind: Kind | None = Kind.CHAT) -> ModelConfig:
        """The model of that name, for this key, if it is of the ``kind``; None takes any.

        Raises ModelNotFound, ModelNotAllowed, UnsupportedEndpoint or Draining.
        """
        self._exchanges.admit()
        model = self.catalog.resolve(name)
        key.require(model.id)
        actual = self.parts.supervisor.kind(model)
        if kind is not None and actual is not kind:
            raise UnsupportedEndpoint(f"The model {model.id!r} {_SAYS[actual]}.", param="model")
        return model

    def generate(self, ask: Ask, key: ApiKey, preferences: Preferences = _NO_PREFERENCES) -> ExchangeResponse:
        """The response to a request for text; raises ModelNotFound, ModelNotAllowed or Draining."""
        model = self.model(ask.request.model, key)
        return self.exchange(Generation(self.parts, checked(ask), model=model, key=key, preferences=preferences))

    def ask(
        self, question: Question, key: ApiKey, kind: Kind, preferences: Preferences = _NO_PREFERENCES
    ) -> ExchangeResponse:
        """The response to a question for numbers; raises as ``model`` does."""
        model = self.model(question.model, key, kind)
        return self.exchange(Query(self.parts, question, model=model, key=key, preferences=preferences))

    def fill(self, request: InfillRequest, key: ApiKey, preferences: Preferences = _NO_PREFERENCES) -> ExchangeResponse:
        """The response to a request to fill in the middle; raises as ``model`` does."""
        model = self.model(request.completion.model, key)
        return self.exchange(Filling(self.parts, request, model=model, key=key, preferences=preferences))

    def inspect(self, inspection: Inspection, key: ApiKey, kind: Kind | None) -> ExchangeResponse:
        """The response to a small question about tokens or templates; raises as ``model`` does."""
        model = self.model(inspection.model, key, kind)
        return self.exchange(Inspector(self.parts, inspection, model=model))

    def count(
        self, request: ChatRequest, key: ApiKey, *, write: Callable[[int], bytes], endpoint: str
    ) -> ExchangeResponse:
        """The response that tells the prompt's tokens; raises ModelNotFound, ModelNotAllowed or Draining."""
        model = self.model(request.model, key)
        return self.exchange(Counting(self.parts, request, model=model, write=write, endpoint=endpoint))

    def exchange(self, work: Work) -> ExchangeResponse:
        """The response that does this work, broken off when the gateway stops or the client leaves."""
        return ExchangeResponse(work, self._exchanges, self.patience)
