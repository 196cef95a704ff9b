"""Slots of every model, leased to one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.metrics import Metrics
from app.scheduler.demand import Demand, Rules
from app.scheduler.queue import Queue, too_many_slots
from app.scheduler.turns import Waiter

_ANY = Demand()
_NO_RULES = Rules()


class Lease:
    """``slots`` slots of one model, held until the ``async with`` ends."""

    def __init__(self, model_id: str, queue: Queue, waiter: Waiter, *, waited_seconds: float) -> None:
        self.model_id = model_id
        self.slots = waiter.slots
        self.waited_seconds = waited_seconds
        self.is_prefilled = False
        self._queue = queue
        self._waiter = waiter
        self._prefilled_at = self._work_before = 0.0

    def prefilled(self) -> None:
        """The prompt is read, the first token is there; idempotent."""
        if not self.is_prefilled:
            self.is_prefilled = True
            self._prefilled_at = asyncio.get_running_loop().time()
            self._work_before = self._queue.work(self._prefilled_at)
            self._queue.prefilled(self._waiter)

    def mean_busy(self) -> float:
        """How many slots of the model worked on average since the first token."""
        now = asyncio.get_running_loop().time()
        if not self.is_prefilled or now <= self._prefilled_at:
            return float(self.slots)
        return (self._queue.work(now) - self._work_before) / (now - self._prefilled_at)

    def used(self, *, prompt_tokens: int, answer_tokens: int) -> None:
        """What it came to; once, at the end: the key pays for this instead of for what was reserved."""
        self._queue.settle(self._waiter, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)


class Scheduler:
    """One queue per model; keys share by weight, requests of one key keep their order."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._queues: dict[str, Queue] = {}

    @asynccontextmanager
    async def lease(
        self,
        model_id: str,
        *,
        key: str,
        capacity: int,
        max_queue: int,
        slots: int = 1,
        demand: Demand = _ANY,
        rules: Rules = _NO_RULES,
    ) -> AsyncIterator[Lease]:
        """Wait for ``slots`` of the engine's ``capacity``.

        Raises Overloaded when ``max_queue`` wait already or the key has its share of the queue, Unavailable when the
        deadline of the request passes.
        """
        if slots > capacity:
            raise too_many_slots(capacity)
        queue = self._queue(model_id)
        queue.resize(capacity, rules)
        loop = asyncio.get_running_loop()
        started = loop.time()
        waiter = await queue.acquire(key, slots=slots, demand=demand, max_queue=max_queue)
        lease = Lease(model_id, queue, waiter, waited_seconds=loop.time() - started)
        self._metrics.of(model_id).queue_wait.observe(lease.waited_seconds)
        try:
            yield lease
        finally:
            queue.release(waiter, is_prefilled=lease.is_prefilled)

    def observe(
        self, model_id: str, *, prompt_tokens_per_second: float | None, answer_tokens_per_second: float | None
    ) -> None:
        """Learn how fast the model is from one of its answers."""
        self._queue(model_id).pace.observe(
            prompt_tokens_per_second=prompt_tokens_per_second, answer_tokens_per_second=answer_tokens_per_second
        )

    def in_flight(self, model_id: str) -> int:
        """Slots leased now."""
        return self._queue(model_id).busy

    def waiting(self, model_id: str) -> int:
        """Requests that wait for a slot now."""
        return self._queue(model_id).waiting

    def held_tokens(self, model_id: str) -> int:
        """Tokens of context promised to requests in flight."""
        return self._queue(model_id).held_tokens

    def show(self, model_id: str) -> None:
        """Have the model's gauges read from its queue; again after its metrics were forgotten."""
        queue = self._queue(model_id)
        self._metrics.watch_queue(
            model_id,
            waiting=lambda: queue.waiting,
            busy=lambda: queue.busy,
            idle=lambda: max(0, queue.capacity - queue.busy),
        )

    def _queue(self, model_id: str) -> Queue:
        queue = self._queues.get(model_id)
        if queue is None:
            queue = self._queues[model_id] = Queue()
            self.show(model_id)
        return queue
