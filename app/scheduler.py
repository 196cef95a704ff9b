"""Admission: the gateway owns the queue, so that no engine ever has more requests in flight than slots."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.errors import InvalidValue, Overloaded
from app.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Lease:
    """``slots`` slots of one model, held until the ``async with`` ends."""

    model_id: str
    slots: int
    waited_seconds: float


class Scheduler:
    """One queue per model; keys take turns, requests of one key keep their order."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._queues: dict[str, _Queue] = {}

    @asynccontextmanager
    async def lease(
        self, model_id: str, *, key: str, capacity: int, max_queue: int, slots: int = 1
    ) -> AsyncIterator[Lease]:
        """Wait for ``slots`` of the engine's ``capacity``; raises Overloaded when ``max_queue`` wait already."""
        if slots > capacity:
            raise _too_many(capacity)
        queue = self._queues.setdefault(model_id, _Queue())
        queue.resize(capacity)
        started = time.monotonic()
        try:
            await queue.acquire(key, slots=slots, max_queue=max_queue, on_change=lambda: self._show(model_id, queue))
            waited = time.monotonic() - started
            self._metrics.queue_wait.labels(model_id).observe(waited)
            try:
                self._show(model_id, queue)
                yield Lease(model_id, slots, waited)
            finally:
                queue.release(slots)
        finally:
            self._show(model_id, queue)

    def in_flight(self, model_id: str) -> int:
        """Slots leased now."""
        queue = self._queues.get(model_id)
        return queue.busy if queue is not None else 0

    def waiting(self, model_id: str) -> int:
        """Requests that wait for a slot now."""
        queue = self._queues.get(model_id)
        return queue.waiting if queue is not None else 0

    def _show(self, model_id: str, queue: _Queue) -> None:
        self._metrics.queue_depth.labels(model_id).set(queue.waiting)
        self._metrics.slots.labels(model_id, "busy").set(queue.busy)
        self._metrics.slots.labels(model_id, "idle").set(max(0, queue.capacity - queue.busy))


@dataclass(eq=False, slots=True)
class _Waiter:
    slots: int
    granted: asyncio.Future[None]


def _is_granted(waiter: _Waiter) -> bool:
    return waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None


def _too_many(capacity: int) -> InvalidValue:
    return InvalidValue(f"'n' must not be over {capacity}, the number of slots of this model.", param="n")


class _Queue:
    """Slots of one model. Everything here runs on the event loop's thread; ``_serve`` is the only place that grants."""

    def __init__(self) -> None:
        self.capacity = 0
        self.busy = 0
        self.waiting = 0
        # Keys that have somebody waiting, next turn first.
        self._turns: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    def resize(self, capacity: int) -> None:
        """Follow the engine, which may come back with more or fewer slots than before."""
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for waiter in [waiter for turn in self._turns.values() for waiter in turn if waiter.slots > capacity]:
            if not waiter.granted.done():
                waiter.granted.set_exception(_too_many(capacity))
        self._serve()

    async def acquire(self, key: str, *, slots: int, max_queue: int, on_change: Callable[[], None]) -> None:
        """Returns with the slots taken; a cancelled waiter leaves nothing behind."""
        if not self._turns and self.busy + slots <= self.capacity:
            self.busy += slots
            return
        if self.waiting >= max_queue:
            raise Overloaded(
                f"{self.waiting} requests already wait for this model; try again later.", retry_after_seconds=5
            )
        waiter = _Waiter(slots, asyncio.get_running_loop().create_future())
        self._turns.setdefault(key, deque()).append(waiter)
        self.waiting += 1
        on_change()
        try:
            await waiter.granted
        except (asyncio.CancelledError, InvalidValue):
            self._withdraw(key, waiter)
            raise

    def release(self, slots: int) -> None:
        """Give slots back and grant them to whose turn it is."""
        self.busy -= slots
        self._serve()

    def _withdraw(self, key: str, waiter: _Waiter) -> None:
        if _is_granted(waiter):
            # Granted in the same turn of the loop in which the client left.
            self.release(waiter.slots)
            return
        queue = self._turns.get(key, deque())
        if waiter not in queue:
            return
        queue.remove(waiter)
        if not queue:
            del self._turns[key]
        self.waiting -= 1
        self._serve()

    def _serve(self) -> None:
        """Grant in turn while the next in turn fits: a request for several slots is not overtaken for ever."""
        while self._turns:
            key, queue = next(iter(self._turns.items()))
            if not queue[0].granted.done() and self.busy + queue[0].slots > self.capacity:
                return
            waiter = queue.popleft()
            self.waiting -= 1
            # A client that left (or was refused) in this very turn of the loop has not withdrawn yet.
            if not waiter.granted.done():
                self.busy += waiter.slots
                waiter.granted.set_result(None)
            if queue:
                self._turns.move_to_end(key)
            else:
                del self._turns[key]
