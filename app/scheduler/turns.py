"""Whose turn it is: keys share by weight, counted in tokens."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from app.scheduler.demand import Demand


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits; ``number`` is the order of arrival."""

    key: str
    slots: int
    demand: Demand
    number: int
    granted: asyncio.Future[None]

    @property
    def is_granted(self) -> bool:
        """Whether it has got its slots, perhaps without having noticed."""
        return self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None


@dataclass(slots=True)
class Turns:
    """Deficit round robin with a quantum of one token: the key served least for its weight is next, then pays.

    A key's ``paid`` is what it has had for its weight. One that comes to wait begins at the ``level`` of those that do,
    so that idling saves nothing up (start-time fair queueing, Goyal, Vin and Cheng 1996). While it waits it may fall
    behind the level: it is given back what it had reserved and did not use.
    """

    waiting: OrderedDict[str, list[Waiter]] = field(default_factory=OrderedDict)
    paid: dict[str, float] = field(default_factory=dict)
    level: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for queue in self.waiting.values() for waiter in queue)

    def of(self, key: str) -> int:
        """How many of a key wait."""
        return len(self.waiting.get(key, ()))

    def add(self, waiter: Waiter) -> None:
        """Queue it behind what its own key finds as urgent."""
        if waiter.key not in self.waiting:
            self._join(waiter.key)
        queue = self.waiting.setdefault(waiter.key, [])
        insort(queue, waiter, key=lambda one: (one.demand.urgency, one.number))

    def next(self, may_start: Callable[[Waiter], bool]) -> Waiter | None:
        """The next in turn of those that may start now."""
        candidates = (next(filter(may_start, queue), None) for queue in self.waiting.values())
        return min(filter(None, candidates), key=lambda waiter: self.paid[waiter.key], default=None)

    def remove(self, waiter: Waiter) -> bool:
        """Take it out without having been served; whether it was there."""
        queue = self.waiting.get(waiter.key, [])
        if waiter not in queue:
            return False
        queue.remove(waiter)
        if not queue:
            del self.waiting[waiter.key]
        return True

    def serve(self, waiter: Waiter) -> None:
        """Take it out; its key pays and goes to the end of those that have had as much."""
        self._pay(waiter)
        if self.remove(waiter) and waiter.key in self.waiting:
            self.waiting.move_to_end(waiter.key)

    def pass_by(self, waiter: Waiter) -> None:
        """It need not wait, but pays."""
        if waiter.key not in self.waiting:
            self._join(waiter.key)
        self._pay(waiter)

    def give_back(self, key: str, demand: Demand, unused_tokens: int) -> None:
        """The key paid for more than it has had."""
        if key in self.paid:
            self.paid[key] -= unused_tokens / demand.weight

    def _join(self, key: str) -> None:
        self.paid[key] = max(self.level, self.paid.get(key, 0.0))

    def _pay(self, waiter: Waiter) -> None:
        self.level = max(self.level, min(self.paid[key] for key in (waiter.key, *self.waiting)))
        self.paid[waiter.key] += waiter.demand.tokens / waiter.demand.weight
