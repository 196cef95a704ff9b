"""The work of one question that is answered with numbers: measured, paid for, given slots, asked in parts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from app.auth import ApiKey
from app.backends import Backend
from app.config import ModelConfig
from app.errors import EngineGone, GatewayError, UpstreamFailed
from app.protocol import Part, Question, Usage, UsageMeter
from app.proxy.account import Account
from app.proxy.outlet import Headers, Outlet
from app.proxy.parts import Parts
from app.proxy.preferences import Preferences
from app.scheduler import Demand, Rules, Urgency
from app.tokens import Sizes


class Query:
    """Answers one question.

    The engine computes what it was once given whether or not its client is still there, so it gets no more at a time
    than fills one context.
    """

    def __init__(
        self, parts: Parts, question: Question, *, model: ModelConfig, key: ApiKey, preferences: Preferences
    ) -> None:
        self._parts = parts
        self._question = question
        self._model = model
        self._key = key
        self._preferences = preferences
        self._account = Account(
            parts.metrics, model_id=model.id, key=key.name, endpoint=question.endpoint, observers=parts.observers
        )
        self._meter = UsageMeter(keep_usage=False)
        self._answers: list[Part] = []
        self._backend: Backend | None = None

    async def run(self, outlet: Outlet) -> None:
        """Measure, reserve, wait for slots, ask; raises GatewayError."""
        model, key, parts = self._model, self._key, self._parts
        sizes, slots, context_tokens, pool_tokens = await self._measure()
        wanted = min(len(sizes.tokens), slots)
        async with (
            parts.quota.reserve(key.name, key.limits, tokens=sizes.total) as reservation,
            parts.scheduler.lease(
                model.id,
                key=key.name,
                capacity=slots,
                max_queue=model.max_queue,
                slots=wanted,
                demand=self._demand(sizes, context_tokens),
                rules=Rules(
                    max_queue_per_key=model.max_queue_per_key,
                    pool_tokens=pool_tokens,
                    long_prompt_tokens=model.long_prompt_tokens,
                    long_prefills=model.long_prefills,
                ),
            ) as lease,
        ):
            self._account.queue_seconds = lease.waited_seconds
            granted = time.monotonic()
            try:
                await self._ask(groups(sizes.tokens, limit=context_tokens))
            finally:
                seconds = (time.monotonic() - granted) * wanted / slots
                self._account.busy_slots = lease.mean_busy()
                if read := self._read_tokens:
                    reservation.charge(tokens=read, gpu_seconds=seconds)
                    lease.used(prompt_tokens=read, answer_tokens=0)
            await self._write(outlet, reservation.headers())

    def silence_headers(self) -> Headers | None:
        """None: the answer is a document with its length."""
        return None

    def failure(self, error: GatewayError) -> bytes:
        """Nothing: the answer begins when it is known."""
        return b""

    def account(self, outcome: str, error: GatewayError | None) -> None:
        """It has ended."""
        self._meter.usage = Usage(prompt_tokens=self._read_tokens)
        self._account.close(outcome, error, self._meter, prompt_tokens=self._read_tokens)

    @property
    def _read_tokens(self) -> int:
        return sum(part.tokens for part in self._answers)

    def _demand(self, sizes: Sizes, context_tokens: int) -> Demand:
        key = self._key
        urgency = self._preferences.urgency or (Urgency.BATCH if key.is_batch else Urgency.INTERACTIVE)
        return Demand(sizes.total, 0, key.weight, urgency, self._model.max_wait_seconds, most_at_once=context_tokens)

    async def _measure(self) -> tuple[Sizes, int, int, int | None]:
        """Tokens of each input with what goes beside it, the slots, the context of one, and what all of them share."""
        question, asked = self._question, time.monotonic()
        exact = self._key.limits.counts_tokens
        async with self._parts.supervisor.use(self._model) as backend:
            self._account.entered(asked)
            counter = backend.counter
            beside = 0
            if question.beside is not None:
                beside = (await counter.sizes([question.beside], field="query", exact=exact)).longest
            sizes = await counter.sizes(question.inputs, field=question.field, beside=beside, exact=exact)
            each = tuple(tokens + beside for tokens in sizes.tokens)
            return Sizes(each, sizes.exact), backend.slots, counter.context_tokens, backend.pool_tokens

    async def _ask(self, ranges: Iterator[range]) -> None:
        for inputs in ranges:
            document = self._question.part(inputs.start, inputs.stop)
            try:
                answer = await self._once(document)
            except EngineGone:
                # Numbers are the same whoever computes them.
                await self._parts.supervisor.replaced(self._model, self._backend)
                answer = await self._once(document)
            part = Part(inputs.start, answer)
            self._require_readable(part)
            self._answers.append(part)

    async def _once(self, document: dict[str, object]) -> dict[str, object]:
        asked = time.monotonic()
        async with self._parts.supervisor.use(self._model) as self._backend:
            self._account.entered(asked)
            self._account.sent()
            return await self._backend.query(self._question.route, document)

    def _require_readable(self, part: Part) -> None:
        try:
            _ = part.tokens
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable() from error

    async def _write(self, outlet: Outlet, headers: Headers) -> None:
        try:
            body = self._question.answer(self._answers, model_id=self._model.id)
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable() from error
        self._account.first_byte = time.monotonic()
        content = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
        await outlet.begin(content + headers)
        await outlet.write(body, more=False)


def groups(tokens: Sequence[int], *, limit: int) -> Iterator[range]:
    """Neighbours that together are at most ``limit`` tokens, at least one each time."""
    start = total = 0
    for index, size in enumerate(tokens):
        if index > start and total + size > limit:
            yield range(start, index)
            start, total = index, 0
        total += size
    yield range(start, len(tokens))


def _unreadable() -> UpstreamFailed:
    return UpstreamFailed("The engine's answer cannot be read; see the gateway's log, or try another model.")
