"""The work of one request for text: admission, budget, slot, engine, answer, in this order and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from app.auth import ApiKey
from app.backends import Backend, Departure, Reply
from app.backends.faults import fault_of
from app.config import ModelConfig
from app.errors import EngineGone, GatewayError, UpstreamFailed
from app.protocol import Answer, Ask, ChatRequest, EventTooLong, StreamRendering, Usage, UsageMeter, with_rounded_times
from app.proxy.account import Account
from app.proxy.outlet import Headers, Outlet
from app.proxy.parts import Parts
from app.proxy.preferences import Preferences
from app.proxy.progress import Phase, Progress
from app.quota import Reservation
from app.scheduler import Demand, Lease, Rules, Urgency
from app.tokens import Admission, Overflow

_T = TypeVar("_T")

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect the stream before it passes it on.
    (b"x-accel-buffering", b"no"),
]


class Generation:
    """Answers one request for text."""

    def __init__(self, parts: Parts, ask: Ask, *, model: ModelConfig, key: ApiKey, preferences: Preferences) -> None:
        self._parts = parts
        self._ask = ask
        self._request = ask.request
        self._model = model
        self._key = key
        self._preferences = preferences
        self._account = Account(
            parts.metrics, model_id=model.id, key=key.name, endpoint=ask.endpoint, observers=parts.observers
        )
        self._meter = self._new_meter()
        self._rendering: StreamRendering | None = None
        self._reservation: Reservation | None = None
        self._lease: Lease | None = None
        self._backend: Backend | None = None
        self._admission: Admission | None = None
        self._notes: Headers = []
        self._is_over = False

    async def run(self, outlet: Outlet) -> None:
        """Admit, reserve, wait for a slot, answer; raises GatewayError."""
        model, key, parts = self._model, self._key, self._parts
        if isinstance(self._request, ChatRequest) and self._request.media:
            self._request = await parts.images.inlined(self._request)
        admission, slots, pool_tokens = await self._once_more(self._count)
        # In the queue the model is not in use: another one's turn may come between.
        async with (
            parts.quota.reserve(key.name, key.limits, tokens=admission.tokens) as self._reservation,
            parts.scheduler.lease(
                model.id,
                key=key.name,
                capacity=slots,
                max_queue=model.max_queue,
                slots=self._request.slots_at_once(slots),
                demand=self._demand(admission),
                rules=_rules(model, pool_tokens),
            ) as self._lease,
        ):
            self._account.queue_seconds = self._lease.waited_seconds
            granted = time.monotonic()
            try:
                await self._once_more(lambda: self._answer(admission, outlet))
            finally:
                share = self._request.slots_at_once(slots) / slots
                self._settle(admission, seconds=(time.monotonic() - granted) * share)

    def silence_headers(self) -> Headers | None:
        """The head of the stream while nothing of the answer has gone out."""
        if self._request.stream and self._key.comments and self._account.first_byte is None:
            return self._stream_headers()
        return None

    def failure(self, error: GatewayError) -> bytes:
        """The error as the client's API has it in a stream."""
        self._account.told(error)
        return (self._rendering or self._ask.new_stream(0)).failure(error)

    def account(self, outcome: str, error: GatewayError | None) -> None:
        """It has ended."""
        self._is_over = True
        self._account.close(outcome, error, self._meter, prompt_tokens=self._prompt_tokens)

    def progress(self) -> Progress | None:
        """How far it is; None once it has been accounted for."""
        if self._is_over:
            return None
        meter, admission = self._meter, self._admission
        phase = Phase.WAITING if self._lease is None else Phase.ANSWER if meter.events else Phase.PROMPT
        return Progress(
            self._model.id,
            self._key.name,
            phase,
            slots=0 if self._lease is None else self._lease.slots,
            prompt_tokens=meter.prompt_tokens,
            prompt_limit_tokens=0 if admission is None else admission.prompt_tokens,
            answer_tokens=meter.generated_tokens,
        )

    async def _once_more(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do it, and again with the next engine when this one ended before anything of the answer had come."""
        try:
            return await work()
        except EngineGone:
            if self._has_begun:
                raise
        await self._parts.supervisor.replaced(self._model, self._backend)
        self._meter = self._new_meter()
        return await work()

    async def _count(self) -> tuple[Admission, int, int | None]:
        """What the prompt takes, how many slots there are, and how many tokens they share."""
        model, key, asked = self._model, self._key, time.monotonic()
        async with self._parts.supervisor.use(model) as backend:
            self._account.entered(asked)
            self._backend = backend
            request, self._notes = self._request.adapted(backend.abilities)
            if model.round_prompt_times and isinstance(request, ChatRequest):
                request, rounded = with_rounded_times(request)
                self._notes = self._notes + rounded
            self._admission = await backend.counter.admit(
                request,
                default_max_tokens=model.max_tokens,
                overflow=self._preferences.overflow or Overflow(model.on_overflow),
                ceiling_tokens=_lesser(model.max_tokens_ceiling, key.max_tokens_ceiling),
                exact=self._ask.exact or key.limits.counts_tokens,
            )
            return self._admission, backend.slots, backend.pool_tokens

    def _demand(self, admission: Admission) -> Demand:
        key = self._key
        urgency = self._preferences.urgency or (Urgency.BATCH if key.is_batch else Urgency.INTERACTIVE)
        return Demand(
            admission.prompt_tokens, admission.answer_tokens, key.weight, urgency, self._model.max_wait_seconds
        )

    def _settle(self, admission: Admission, *, seconds: float) -> None:
        """Charge what was really processed and generated, whoever broke it off."""
        meter, prompt = self._meter, self._prompt_tokens
        if prompt and self._reservation is not None:
            self._reservation.charge(tokens=prompt + meter.generated_tokens, gpu_seconds=seconds)
        if self._lease is not None:
            self._account.busy_slots = self._lease.mean_busy()
            self._lease.used(prompt_tokens=prompt, answer_tokens=meter.generated_tokens)
        if meter.timings is not None:
            self._parts.scheduler.observe(
                self._model.id,
                prompt_tokens_per_second=meter.timings.prompt_tokens_per_second,
                answer_tokens_per_second=meter.timings.generation_tokens_per_second,
            )

    async def _answer(self, admission: Admission, outlet: Outlet) -> None:
        request, asked = admission.request, time.monotonic()
        async with self._parts.supervisor.use(self._model) as backend:
            self._account.entered(asked)
            self._backend = backend
            slots = 1 if backend.chooses_slots or request.choices > 1 else backend.slots
            with self._parts.affinities.slot(backend, request.messages, slots=slots) as slot:
                body = request.engine_body(max_tokens=admission.max_tokens, slot=slot)
                departure = Departure(slot if backend.slots > 1 or request.choices > 1 else 0)
                self._account.sent()
                try:
                    async with backend.open(body, request.route, departure=departure) as reply:
                        if request.stream:
                            await self._relay(reply, outlet, self._new_rendering(admission))
                        else:
                            await self._aggregate(reply, outlet, self._ask.new_answer(admission.prompt_tokens))
                except asyncio.CancelledError:
                    self._note(departure, admission)
                    raise

    def _note(self, departure: Departure, admission: Admission) -> None:
        """What was on its way when the client left was generated too, and so was what the engine kept back."""
        with suppress(EventTooLong):
            self._meter.feed(departure.unread)
        if departure.held_tokens is not None:
            self._meter.left(departure.held_tokens, prompt_tokens=admission.prompt_tokens)

    def _new_meter(self) -> UsageMeter:
        request = self._request
        if isinstance(request, ChatRequest):
            return UsageMeter(keep_usage=request.include_usage, choices=request.choices)
        prompts = len(request.prompts)
        return UsageMeter(keep_usage=request.include_usage, choices=request.choices, prompts=prompts, has_roles=False)

    def _new_rendering(self, admission: Admission) -> StreamRendering:
        self._rendering = self._ask.new_stream(admission.prompt_tokens)
        return self._rendering

    @property
    def _prompt_tokens(self) -> int:
        """What the engine has read or reused of the prompt."""
        meter = self._meter
        if meter.prompt_tokens or self._admission is None:
            return meter.prompt_tokens
        return self._admission.prompt_tokens if meter.events else 0

    @property
    def _has_begun(self) -> bool:
        """Whether anything of the answer has come: then it is not asked for again."""
        return self._account.first_byte is not None or self._meter.events > 0

    async def _relay(self, reply: Reply, outlet: Outlet, rendering: StreamRendering) -> None:
        while chunk := await reply.read():
            if (body := self._feed(chunk)) and (body := rendering.feed(body)):
                if self._account.first_byte is None:
                    await self._begin(outlet)
                    if self._ask.is_verbatim:
                        reply.hand_to(partial(self._pass_on, outlet))
                await outlet.write(body)
        self._require_complete()
        if self._account.first_byte is None:
            # An answer without a word, of which only the end is written.
            await self._begin(outlet)
        await outlet.write(rendering.end(self._meter.usage or Usage()), more=False)

    def _pass_on(self, outlet: Outlet, part: bytes) -> bool:
        """Forward at once what needs no look; anything else waits for its turn."""
        if not self._meter.is_plain(part) or not outlet.write_now(part):
            return False
        self._meter.count(part)
        return True

    async def _begin(self, outlet: Outlet) -> None:
        self._account.first_byte = time.monotonic()
        await outlet.begin(self._stream_headers())

    async def _aggregate(self, reply: Reply, outlet: Outlet, answer: Answer) -> None:
        while chunk := await reply.read():
            if body := self._feed(chunk):
                _add(answer, body)
        self._require_complete()
        body = answer.body(self._meter.usage or Usage())
        self._account.first_byte = time.monotonic()
        headers = [(b"content-type", self._ask.content_type), (b"content-length", str(len(body)).encode())]
        await outlet.begin(headers + self._context_headers())
        await outlet.write(body, more=False)

    def _stream_headers(self) -> Headers:
        return _EVENT_STREAM + self._context_headers()

    def _context_headers(self) -> Headers:
        """What is known of context and budget; nothing while the model still loads."""
        context = [] if self._admission is None else self._admission.headers()
        return context + self._notes + ([] if self._reservation is None else self._reservation.headers())

    def _feed(self, chunk: bytes) -> bytes:
        try:
            body = self._meter.feed(chunk)
        except EventTooLong as error:
            raise UpstreamFailed(f"The engine's answer cannot be read: {error}.", streamed=True) from error
        if self._account.first_token is None and self._meter.events:
            self._account.first_token = time.monotonic()
            if self._lease is not None:
                self._lease.prefilled()
        return body

    def _require_complete(self) -> None:
        """An answer that just ends, or ends in an error, is never passed off as finished."""
        if self._meter.error is not None:
            raise fault_of(500, self._meter.error, streamed=True)
        if not self._meter.complete:
            raise EngineGone("The engine ended in the middle of the answer; send the request again.", streamed=True)


def _add(answer: Answer, body: bytes) -> None:
    try:
        answer.feed(body)
    except ValueError as error:
        raise UpstreamFailed(f"The engine's answer cannot be read: {error}.", streamed=True) from error


def _lesser(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _rules(model: ModelConfig, pool_tokens: int | None) -> Rules:
    return Rules(
        max_queue_per_key=model.max_queue_per_key,
        pool_tokens=pool_tokens,
        long_prompt_tokens=model.long_prompt_tokens,
        long_prefills=model.long_prefills,
    )
