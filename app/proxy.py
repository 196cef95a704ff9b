"""One request from admission to accounting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from app.auth import ApiKey
from app.backends import Backend, Reply
from app.backends.faults import fault_of
from app.config import ModelCatalog, ModelConfig
from app.errors import ContextLengthExceeded, Draining, EngineGone, GatewayError, UpstreamFailed
from app.metrics import Metrics
from app.outlet import Headers, Outlet
from app.protocol import ChatAnswer, ChatRequest, EventTooLong, Usage, UsageMeter
from app.quota import Quota, Reservation
from app.scheduler import Affinities, Demand, Lease, Rules, Scheduler, Urgency
from app.supervisor import Supervisor
from app.tokens import Admission, Overflow

_T = TypeVar("_T")

_TELL_SECONDS = 1.0

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect the stream before it passes it on.
    (b"x-accel-buffering", b"no"),
]


# How often a silent stream gets a sign of life; proxies and clients on the way give up after 30 s at the earliest.
_PULSE_SECONDS = 15.0
# How long a client may leave what it was sent unread.
_STALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Preferences:
    """What the client asked for beside the body; None leaves it to key and model."""

    overflow: Overflow | None = None
    urgency: Urgency | None = None


_NO_PREFERENCES = Preferences()


class Proxy:
    """Makes an exchange of each chat request."""

    def __init__(
        self, *, catalog: ModelCatalog, supervisor: Supervisor, scheduler: Scheduler, metrics: Metrics, quota: Quota
    ) -> None:
        self.catalog = catalog
        self.supervisor = supervisor
        self.scheduler = scheduler
        self.metrics = metrics
        self.quota = quota
        self.affinities = Affinities()
        self.pulse_seconds = _PULSE_SECONDS
        self.stall_seconds = _STALL_SECONDS
        self._exchanges: set[ExchangeResponse] = set()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new exchanges, let the open ones end, and after ``seconds`` end them with an error."""
        self._is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for exchange in tuple(self._exchanges):
                exchange.cut(Draining("The gateway is stopping; the answer was broken off.", retry_after_seconds=5))
            # A client that does not read cannot be told.
            with suppress(TimeoutError):
                async with asyncio.timeout(_TELL_SECONDS):
                    await self._idle.wait()

    @contextmanager
    def tracked(self, exchange: ExchangeResponse) -> Iterator[None]:
        """Count an exchange as open until the block ends."""
        self._exchanges.add(exchange)
        self._idle.clear()
        try:
            yield
        finally:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._idle.set()

    def chat(self, request: ChatRequest, key: ApiKey, preferences: Preferences = _NO_PREFERENCES) -> ExchangeResponse:
        """The response to a chat request; raises ModelNotFound, ModelNotAllowed or Draining."""
        if self._is_draining:
            raise Draining("The gateway is stopping; try again.", retry_after_seconds=5)
        model = self.catalog.resolve(request.model)
        key.require(model.id)
        return ExchangeResponse(self, request, model=model, key=key, preferences=preferences)


class ExchangeResponse:
    """An ASGI response that does its work when called, so that whatever it takes is given back by its own ``with``."""

    def __init__(
        self, proxy: Proxy, request: ChatRequest, *, model: ModelConfig, key: ApiKey, preferences: Preferences
    ) -> None:
        self._proxy = proxy
        self._request = request
        self._model = model
        self._key = key
        self._preferences = preferences
        self._reservation: Reservation | None = None
        self._lease: Lease | None = None
        self._meter = self._new_meter()
        self._backend: Backend | None = None
        self._arrived = time.monotonic()
        self._first_byte: float | None = None
        self._admission: Admission | None = None
        self._task: asyncio.Task[None] | None = None
        self._cut_by: GatewayError | None = None

    def cut(self, error: GatewayError) -> None:
        """Break the exchange off; the client is told ``error``."""
        if self._task is not None and self._cut_by is None:
            self._cut_by = error
            self._task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Race the exchange against the client's leaving; who leaves takes the exchange down with it."""
        with self._proxy.tracked(self):
            await self._race(receive, Outlet(send))

    async def _race(self, receive: Receive, outlet: Outlet) -> None:
        exchange = self._task = asyncio.create_task(self._run(outlet))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            while not await _any_done(exchange, gone, seconds=self._proxy.pulse_seconds):
                if outlet.stalled_seconds() > self._proxy.stall_seconds:
                    # A client that does not read is as good as gone, but for the memory and the slot it holds.
                    break
                await self._keep_alive(outlet)
        finally:
            # The loop hands out CancelledError where each of them waits; both are awaited, so nothing outlives us.
            for task in (exchange, gone):
                task.cancel()
            await asyncio.gather(exchange, gone, return_exceptions=True)
        if not exchange.cancelled():
            exchange.result()

    async def _keep_alive(self, outlet: Outlet) -> None:
        """A sign of life while a stream has nothing to say: in the queue, while a model loads, in prefill."""
        if self._request.stream and self._key.comments and self._first_byte is None:
            await outlet.keep_alive(self._stream_headers())

    async def _run(self, outlet: Outlet) -> None:
        outcome = "client_gone"
        try:
            await self._uncut(outlet)
            outcome = "ok"
        except GatewayError as error:
            outcome = "rejected" if error.status < 500 else "failed"
            if isinstance(error, ContextLengthExceeded):
                self._proxy.metrics.context_overflow.labels(self._model.id).inc()
            if not outlet.begun:
                raise
            # The status is sent: say it in the stream, then let the server break the connection off.
            await outlet.write(b"data: " + orjson.dumps(error.body()) + b"\n\n")
        finally:
            self._account(outcome)

    async def _uncut(self, outlet: Outlet) -> None:
        try:
            await self._exchange(outlet)
        except asyncio.CancelledError:
            if self._cut_by is None:
                raise
            raise self._cut_by from None

    async def _exchange(self, outlet: Outlet) -> None:
        request, model, key, proxy = self._request, self._model, self._key, self._proxy
        admission, slots = await self._once_more(self._count)
        # In the queue the model is not in use: another one's turn may come between.
        async with (
            proxy.quota.reserve(key.name, key.limits, tokens=admission.tokens) as self._reservation,
            proxy.scheduler.lease(
                model.id,
                key=key.name,
                capacity=slots,
                max_queue=model.max_queue,
                slots=request.choices,
                demand=self._demand(admission),
                rules=_rules(model),
            ) as self._lease,
        ):
            granted = time.monotonic()
            try:
                await self._once_more(lambda: self._answer(admission, outlet))
            finally:
                self._settle(admission, seconds=(time.monotonic() - granted) * request.choices / slots)

    async def _once_more(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do it, and again with the next engine when this one ended before anything of the answer had come."""
        try:
            return await work()
        except EngineGone:
            if self._has_begun:
                raise
        await self._proxy.supervisor.replaced(self._model, self._backend)
        self._meter = self._new_meter()
        return await work()

    async def _count(self) -> tuple[Admission, int]:
        """What the prompt takes, and how many slots there are."""
        model, key = self._model, self._key
        async with self._proxy.supervisor.use(model) as backend:
            self._backend = backend
            self._admission = await backend.counter.admit(
                self._request,
                default_max_tokens=model.max_tokens,
                overflow=self._preferences.overflow or Overflow(model.on_overflow),
                ceiling_tokens=_lesser(model.max_tokens_ceiling, key.max_tokens_ceiling),
                exact=key.limits.counts_tokens,
            )
            return self._admission, backend.slots

    def _demand(self, admission: Admission) -> Demand:
        key = self._key
        urgency = self._preferences.urgency or (Urgency.BATCH if key.is_batch else Urgency.INTERACTIVE)
        return Demand(
            admission.prompt_tokens, admission.answer_tokens, key.weight, urgency, self._model.max_wait_seconds
        )

    def _settle(self, admission: Admission, *, seconds: float) -> None:
        """Charge what was really processed and generated, whoever broke it off."""
        meter = self._meter
        prompt = meter.prompt_tokens or (admission.prompt_tokens if meter.events else 0)
        if prompt and self._reservation is not None:
            self._reservation.charge(tokens=prompt + meter.generated_tokens, gpu_seconds=seconds)
        if self._lease is not None:
            self._lease.used(prompt_tokens=prompt, answer_tokens=meter.generated_tokens)
        if meter.timings is not None:
            self._proxy.scheduler.observe(
                self._model.id,
                prompt_tokens_per_second=meter.timings.prompt_tokens_per_second,
                answer_tokens_per_second=meter.timings.generation_tokens_per_second,
            )

    async def _answer(self, admission: Admission, outlet: Outlet) -> None:
        request = admission.request
        async with self._proxy.supervisor.use(self._model) as backend:
            self._backend = backend
            slots = backend.slots if request.choices == 1 else 1
            with self._proxy.affinities.slot(backend, request.messages, slots=slots) as slot:
                body = request.engine_body(max_tokens=admission.max_tokens, slot=slot)
                async with backend.open(body) as reply:
                    if request.stream:
                        await self._relay(reply, outlet)
                    else:
                        await self._aggregate(reply, outlet)

    def _new_meter(self) -> UsageMeter:
        return UsageMeter(keep_usage=self._request.include_usage, choices=self._request.choices)

    @property
    def _has_begun(self) -> bool:
        """Whether anything of the answer has come: then it is not asked for again."""
        return self._first_byte is not None or self._meter.events > 0

    async def _relay(self, reply: Reply, outlet: Outlet) -> None:
        async for chunk in reply.chunks():
            if body := self._feed(chunk):
                if self._first_byte is None:
                    self._first_byte = time.monotonic()
                    await outlet.begin(self._stream_headers())
                await outlet.write(body)
        self._require_complete()
        await outlet.write(b"", more=False)

    async def _aggregate(self, reply: Reply, outlet: Outlet) -> None:
        answer = ChatAnswer()
        first_byte: float | None = None
        async for chunk in reply.chunks():
            if body := self._feed(chunk):
                first_byte = first_byte or time.monotonic()
                _add(answer, body)
        self._require_complete()
        self._first_byte = first_byte
        body = answer.body(self._meter.usage or Usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await outlet.begin(headers + self._context_headers())
        await outlet.write(body, more=False)

    def _stream_headers(self) -> Headers:
        return _EVENT_STREAM + self._context_headers()

    def _context_headers(self) -> Headers:
        """What is known of context and budget; nothing while the model still loads."""
        context = [] if self._admission is None else self._admission.headers()
        return context + ([] if self._reservation is None else self._reservation.headers())

    def _feed(self, chunk: bytes) -> bytes:
        try:
            body = self._meter.feed(chunk)
        except EventTooLong as error:
            raise UpstreamFailed(f"The engine's answer cannot be read: {error}.", streamed=True) from error
        if self._lease is not None and self._meter.events:
            self._lease.prefilled()
        return body

    def _require_complete(self) -> None:
        """An answer that just ends, or ends in an error, is never passed off as finished."""
        if self._meter.error is not None:
            raise fault_of(500, self._meter.error, streamed=True)
        if not self._meter.complete:
            raise EngineGone("The engine ended in the middle of the answer; send the request again.", streamed=True)

    def _account(self, outcome: str) -> None:
        metrics, meter, model_id, key = self._proxy.metrics, self._meter, self._model.id, self._key.name
        ended = time.monotonic()
        metrics.requests.labels(model_id, "chat", outcome).inc()
        metrics.request_duration.labels(model_id).observe(ended - self._arrived)
        if outcome == "client_gone":
            metrics.client_disconnects.inc()
        if self._first_byte is not None:
            metrics.time_to_first_token.labels(model_id).observe(self._first_byte - self._arrived)
            generated = meter.generated_tokens
            metrics.generation_tokens.labels(model_id, key).inc(generated)
            metrics.generation_size.labels(model_id).observe(generated)
            if generated > 1:
                metrics.inter_token_latency.labels(model_id).observe((ended - self._first_byte) / (generated - 1))
        if meter.usage is not None:
            metrics.prompt_tokens.labels(model_id, key).inc(meter.usage.prompt_tokens)
            metrics.cached_prompt_tokens.labels(model_id, key).inc(meter.usage.cached_tokens)
            metrics.prompt_size.labels(model_id).observe(meter.usage.prompt_tokens)
        if meter.timings is not None:
            _set_rate(metrics.prompt_rate.labels(model_id), meter.timings.prompt_tokens_per_second)
            _set_rate(metrics.generation_rate.labels(model_id), meter.timings.generation_tokens_per_second)


def _add(answer: ChatAnswer, body: bytes) -> None:
    try:
        answer.feed(body)
    except ValueError as error:
        raise UpstreamFailed(f"The engine's answer cannot be read: {error}.", streamed=True) from error


def _set_rate(gauge: Any, tokens_per_second: float | None) -> None:
    if tokens_per_second is not None:
        gauge.set(tokens_per_second)


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has closed its side; half a close counts, since llama-server reads it so too."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _any_done(*tasks: asyncio.Task[None], seconds: float) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


def _lesser(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _rules(model: ModelConfig) -> Rules:
    return Rules(
        max_queue_per_key=model.max_queue_per_key,
        long_prompt_tokens=model.long_prompt_tokens,
        long_prefills=model.long_prefills,
    )
