"""One request from admission to accounting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from app.auth import ApiKey
from app.backends import Reply
from app.backends.faults import fault_of
from app.config import ModelCatalog, ModelConfig
from app.errors import ContextLengthExceeded, GatewayError, UpstreamFailed
from app.metrics import Metrics
from app.protocol import ChatAnswer, ChatRequest, EventTooLong, Usage, UsageMeter
from app.scheduler import Scheduler
from app.supervisor import Supervisor
from app.tokens import Admission

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect the stream before it passes it on.
    (b"x-accel-buffering", b"no"),
]


class Proxy:
    """Makes an exchange of each chat request."""

    def __init__(
        self, *, catalog: ModelCatalog, supervisor: Supervisor, scheduler: Scheduler, metrics: Metrics
    ) -> None:
        self.catalog = catalog
        self.supervisor = supervisor
        self.scheduler = scheduler
        self.metrics = metrics

    def chat(self, request: ChatRequest, key: ApiKey) -> ExchangeResponse:
        """The response to a chat request; raises ModelNotFound or ModelNotAllowed."""
        model = self.catalog.resolve(request.model)
        key.require(model.id)
        return ExchangeResponse(self, request, model=model, key=key)


class ExchangeResponse:
    """An ASGI response that does its work when called, so that whatever it takes is given back by its own ``with``."""

    def __init__(self, proxy: Proxy, request: ChatRequest, *, model: ModelConfig, key: ApiKey) -> None:
        self._proxy = proxy
        self._request = request
        self._model = model
        self._key = key
        self._meter = UsageMeter(keep_usage=request.include_usage, choices=request.choices)
        self._arrived = time.monotonic()
        self._first_byte: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Race the exchange against the client's leaving; who leaves takes the exchange down with it."""
        exchange = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait((exchange, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The loop hands out CancelledError where each of them waits; both are awaited, so nothing outlives us.
            for task in (exchange, gone):
                task.cancel()
            await asyncio.gather(exchange, gone, return_exceptions=True)
        if not exchange.cancelled():
            exchange.result()

    async def _run(self, send: Send) -> None:
        outcome = "client_gone"
        try:
            await self._exchange(send)
            outcome = "ok"
        except GatewayError as error:
            outcome = "rejected" if error.status < 500 else "failed"
            if isinstance(error, ContextLengthExceeded):
                self._proxy.metrics.context_overflow.labels(self._model.id).inc()
            if self._first_byte is None:
                raise
            # The status is sent: say it in the stream, then let the server break the connection off.
            await send(_body(b"data: " + orjson.dumps(error.body()) + b"\n\n"))
        finally:
            self._account(outcome)

    async def _exchange(self, send: Send) -> None:
        request, model, proxy = self._request, self._model, self._proxy
        backend = await proxy.supervisor.ready(model)
        admission = await backend.counter.admit(
            request, default_max_tokens=model.max_tokens, clamp=model.on_overflow == "clamp"
        )
        async with proxy.scheduler.lease(
            model.id, key=self._key.name, capacity=backend.slots, max_queue=model.max_queue, slots=request.choices
        ):
            # While we waited for the slot the engine may have died and been replaced.
            backend = await proxy.supervisor.ready(model)
            async with backend.open(request.engine_body(max_tokens=admission.max_tokens)) as reply:
                if request.stream:
                    await self._relay(reply, admission, send)
                else:
                    await self._aggregate(reply, admission, send)

    async def _relay(self, reply: Reply, admission: Admission, send: Send) -> None:
        async for chunk in reply.chunks():
            if body := self._feed(chunk):
                if self._first_byte is None:
                    self._first_byte = time.monotonic()
                    await send(_start(200, _EVENT_STREAM + _context_headers(admission)))
                await send(_body(body))
        self._require_complete()
        await send(_body(b"", more=False))

    async def _aggregate(self, reply: Reply, admission: Admission, send: Send) -> None:
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
        await send(_start(200, headers + _context_headers(admission)))
        await send(_body(body, more=False))

    def _feed(self, chunk: bytes) -> bytes:
        try:
            return self._meter.feed(chunk)
        except EventTooLong as error:
            raise UpstreamFailed(f"The engine's answer cannot be read: {error}.", streamed=True) from error

    def _require_complete(self) -> None:
        """An answer that just ends, or ends in an error, is never passed off as finished."""
        if self._meter.error is not None:
            raise fault_of(500, self._meter.error, streamed=True)
        if not self._meter.complete:
            raise UpstreamFailed("The engine ended in the middle of the answer; send the request again.", streamed=True)

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


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> MutableMapping[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(body: bytes, *, more: bool = True) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _context_headers(admission: Admission) -> list[tuple[bytes, bytes]]:
    """What the request uses of its context; ``x-context-count: bound`` means at most so many prompt tokens."""
    prompt, limit = admission.prompt_tokens, admission.context_tokens
    headers = [
        (b"x-context-limit", b"%d" % limit),
        (b"x-context-prompt-tokens", b"%d" % prompt),
        (b"x-context-remaining", b"%d" % (limit - prompt)),
        (b"x-context-count", b"exact" if admission.exact else b"bound"),
    ]
    if admission.clamped:
        headers.append((b"x-context-clamped", b"%d" % admission.max_tokens))
    return headers
