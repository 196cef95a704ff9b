"""What happened lately, for whoever looks: a bounded history in memory, and live to those who watch.

Everything here runs on the event loop's thread; ``EventLog.record`` is the only writer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.logs import redact

_KEPT = 500
_BEHIND = 64


class EventKind(StrEnum):
    """What sort of thing happened."""

    LOAD = "load"
    UNLOAD = "unload"
    EVICTION = "eviction"
    RESTART = "restart"
    FAILED = "failed"
    STEP_DOWN = "step_down"
    DEGRADED = "degraded"
    SLOW_DOWN = "slow_down"
    RELOAD = "reload"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; ``at`` is Unix time, ``seconds`` how long it took or will take.

    ``message`` may be shown to everybody who may use the model, ``detail`` only to operators: it may name paths.
    """

    number: int
    at: float
    kind: EventKind
    message: str
    model: str | None = None
    cause: str | None = None
    seconds: float | None = None
    detail: str | None = None

    def document(self, *, for_operator: bool) -> dict[str, Any]:
        """The event as JSON."""
        document = {
            "number": self.number,
            "at": round(self.at, 3),
            "kind": self.kind.value,
            "model": self.model,
            "cause": self.cause,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "message": self.message,
        }
        return document | {"detail": self.detail} if for_operator else document


class FellBehind(Exception):
    """The watcher did not read for so long that events were lost to it; it reads the history and watches anew."""


class EventLog:
    """The last events, and of each model the last one however long ago."""

    def __init__(self, *, kept: int = _KEPT, behind: int = _BEHIND, clock: Callable[[], float] = time.time) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._last: dict[str, Event] = {}
        self._numbers = itertools.count(1)
        self._behind = behind
        self._clock = clock
        self._watches: set[Watch] = set()

    def record(
        self,
        kind: EventKind,
        message: str,
        *,
        model: str | None = None,
        cause: str | None = None,
        seconds: float | None = None,
        detail: str | None = None,
    ) -> Event:
        """Write down what just happened and tell who watches; never waits. What looks like a key is left out."""
        detail = None if detail is None else redact(detail)
        event = Event(next(self._numbers), self._clock(), kind, redact(message), model, cause, seconds, detail)
        self._events.append(event)
        if model is not None:
            self._last[model] = event
        for watch in tuple(self._watches):
            if not watch.offer(event):
                self._watches.discard(watch)
        return event

    def latest(self, count: int, *, after: int = 0) -> list[Event]:
        """At most ``count`` events with a number over ``after``, oldest first."""
        newer = [event for event in self._events if event.number > after]
        return newer[max(0, len(newer) - count) :]

    def last_of(self, model: str) -> Event | None:
        """The last thing that happened to a model."""
        return self._last.get(model)

    def forget_model(self, model: str) -> None:
        """A model that is no longer configured has no last event; the history keeps it."""
        self._last.pop(model, None)

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Every event from now on, until the block ends."""
        watch = Watch(self._behind)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)


class Watch:
    """The events for one watcher, who is let go when too far behind."""

    def __init__(self, behind: int) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue(behind)
        self._is_lost = False

    def offer(self, event: Event) -> bool:
        """Hand over one event; False when there is no room for it: then nothing comes any more."""
        if self._queue.full():
            self._is_lost = True
            return False
        self._queue.put_nowait(event)
        return True

    async def next(self) -> Event:
        """The next event; raises FellBehind after those that were still kept."""
        if self._is_lost and self._queue.empty():
            raise FellBehind
        return await self._queue.get()
