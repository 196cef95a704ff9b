"""One model's slots and those who wait for them."""

from __future__ import annotations

import asyncio
import itertools

from app.errors import InvalidValue, Overloaded, Unavailable
from app.scheduler.demand import Demand, Rules
from app.scheduler.pace import Pace
from app.scheduler.turns import Turns, Waiter


def too_many_slots(capacity: int) -> InvalidValue:
    """The answer to who wants more slots than there are."""
    return InvalidValue(f"'n' must not be over {capacity}, the number of slots of this model.", param="n")


class Queue:
    """Everything here runs on the event loop's thread; ``_serve`` is the only place that grants to who waits."""

    def __init__(self) -> None:
        self.capacity = 0
        self.rules = Rules()
        self.busy = 0
        # Slots × seconds, up to the last change of ``busy``.
        self._work = 0.0
        self._work_at = 0.0
        self.waiting = 0
        self.held_tokens = 0
        self.long_prefills = 0
        self.pace = Pace()
        self._turns = Turns()
        self._numbers = itertools.count()

    def resize(self, capacity: int, rules: Rules) -> None:
        """Follow the engine, which may come back with more or fewer slots than before."""
        if (capacity, rules) == (self.capacity, self.rules):
            return
        self.capacity, self.rules = capacity, rules
        for waiter in self._turns:
            if waiter.slots > capacity and not waiter.granted.done():
                waiter.granted.set_exception(too_many_slots(capacity))
        self._serve()

    async def acquire(self, key: str, *, slots: int, demand: Demand, max_queue: int) -> Waiter:
        """Returns with the slots taken; a cancelled waiter leaves nothing behind."""
        waiter = Waiter(key, slots, demand, next(self._numbers), asyncio.get_running_loop().create_future())
        if self._turns.next(self._may_start) is None and self._fits(waiter) and self._may_start(waiter):
            self._turns.pass_by(waiter)
            self._take(waiter)
            return waiter
        self._refuse_what_is_too_much(waiter, max_queue)
        self._turns.add(waiter)
        self.waiting += 1
        try:
            async with asyncio.timeout(demand.deadline_seconds):
                await waiter.granted
        except TimeoutError:
            self._withdraw(waiter)
            raise Unavailable(
                f"No slot of this model became free within {demand.deadline_seconds:g} s; try again later.",
                retry_after_seconds=self._promise(waiter, to=None),
            ) from None
        except (asyncio.CancelledError, InvalidValue):
            self._withdraw(waiter)
            raise
        return waiter

    def release(self, waiter: Waiter, *, is_prefilled: bool) -> None:
        """Give slots back and grant them to whose turn it is."""
        self._occupy(-waiter.slots)
        self.held_tokens -= waiter.demand.held_tokens
        if not is_prefilled:
            self.prefilled(waiter, serve=False)
        self._serve()

    def prefilled(self, waiter: Waiter, *, serve: bool = True) -> None:
        """Its prompt is read: another long one may begin."""
        if self._is_long(waiter):
            self.long_prefills -= 1
            if serve:
                self._serve()

    def settle(self, waiter: Waiter, *, prompt_tokens: int, answer_tokens: int) -> None:
        """Let the key pay for what it has had instead of what was reserved."""
        self.pace.used(waiter.demand, answer_tokens)
        unused = waiter.demand.tokens - max(1, prompt_tokens + answer_tokens)
        self._turns.give_back(waiter.key, waiter.demand, unused)

    def _refuse_what_is_too_much(self, waiter: Waiter, max_queue: int) -> None:
        most, of_key = self.rules.max_queue_per_key, self._turns.of(waiter.key)
        if self.waiting >= max_queue:
            raise Overloaded(
                f"{self.waiting} requests already wait for this model; try again later.",
                retry_after_seconds=self._promise(waiter, to=None),
            )
        if most is not None and of_key >= most:
            raise Overloaded(
                f"{of_key} requests of the key {waiter.key!r} already wait for this model; try again later.",
                retry_after_seconds=self._promise(waiter, to=waiter.key),
            )

    def _promise(self, waiter: Waiter, *, to: str | None) -> float:
        """When to come back: behind who waits and who was sent away before, at the measured rates."""
        demands = [one.demand for one in self._turns] or [waiter.demand]
        prompt = sum(demand.prompt_tokens for demand in demands) // len(demands)
        answer = sum(demand.answer_tokens for demand in demands) // len(demands)
        parallel = float(self.capacity)
        if to is not None:
            weights = {one.key: one.demand.weight for one in self._turns}
            parallel *= waiter.demand.weight / sum(weights.values())
        seconds = self.pace.seconds(Demand(prompt, answer))
        return self.pace.promise(seconds, parallel=parallel, now=asyncio.get_running_loop().time(), to=to)

    def work(self, now: float) -> float:
        """Slots × seconds for which they were busy, from some moment on to ``now``."""
        return self._work + self.busy * (now - self._work_at)

    def _occupy(self, slots: int) -> None:
        now = asyncio.get_running_loop().time()
        self._work, self._work_at = self.work(now), now
        self.busy += slots

    def _fits(self, waiter: Waiter) -> bool:
        if self.busy + waiter.slots > self.capacity:
            return False
        pool = self.rules.pool_tokens
        # What was admitted fits an empty pool.
        return pool is None or self.held_tokens == 0 or self.held_tokens + waiter.demand.held_tokens <= pool

    def _is_long(self, waiter: Waiter) -> bool:
        return waiter.demand.prompt_tokens >= self.rules.long_prompt_tokens

    def _may_start(self, waiter: Waiter) -> bool:
        """Whether it is not held up by the long prompts that are being read; who is gone holds nobody up."""
        most = self.rules.long_prefills
        return waiter.granted.done() or most is None or self.long_prefills < most or not self._is_long(waiter)

    def _take(self, waiter: Waiter) -> None:
        self._occupy(waiter.slots)
        self.held_tokens += waiter.demand.held_tokens
        self.long_prefills += self._is_long(waiter)

    def _withdraw(self, waiter: Waiter) -> None:
        if waiter.is_granted:
            # Granted in the same turn of the loop in which the client left.
            self.release(waiter, is_prefilled=False)
        elif self._turns.remove(waiter):
            self.waiting -= 1
            self._serve()

    def _serve(self) -> None:
        """Grant in turn while the next in turn fits: a request for several slots is not overtaken for ever."""
        while waiter := self._turns.next(self._may_start):
            if waiter.granted.done():
                # A client that left (or was refused) in this very turn of the loop has not withdrawn yet.
                self._turns.remove(waiter)
                self.waiting -= 1
                continue
            if not self._fits(waiter):
                return
            self._turns.serve(waiter)
            self.waiting -= 1
            self._take(waiter)
            waiter.granted.set_result(None)
