"""When an engine that ended is started again: pure, the clock and the dice are passed in."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartRules:
    """Limits; all times in seconds.

    More than ``ready_restarts`` deaths within ``ready_window``, or ``failed_loads`` failed loads, and the model is
    given up until ``half_open`` has passed. Only ``healthy`` seconds of service clear the counters.
    """

    first_delay: float = 1.0
    longest_delay: float = 60.0
    jitter: float = 0.2
    ready_restarts: int = 5
    ready_window: float = 60.0
    failed_loads: int = 3
    half_open: float = 300.0
    healthy: float = 600.0


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after ``delay_seconds``."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave it until somebody asks again after ``retry_seconds``."""

    retry_seconds: float


class RestartPolicy:
    """Counts the deaths of one model; ``now`` is any clock that never goes back."""

    def __init__(self, rules: RestartRules | None = None, *, dice: Callable[[], float] = random.random) -> None:
        self._rules = rules or RestartRules()
        self._dice = dice
        self._ready_at: float | None = None
        self._ready_deaths: deque[float] = deque()
        self._failed_loads = 0
        self._deaths = 0

    @property
    def deaths(self) -> int:
        """Deaths that have not been made up for by a long healthy life."""
        return self._deaths

    def became_ready(self, now: float) -> None:
        """The engine serves; that alone forgives nothing."""
        self._ready_at = now

    def ended(self, now: float, *, permanent: bool) -> Again | GiveUp:
        """The engine ended unasked, or did not even become ready; ``permanent`` causes would only repeat."""
        was_ready = self._ready_at is not None
        if self._ready_at is not None and now - self._ready_at >= self._rules.healthy:
            self.forgive()
        self._ready_at = None
        self._deaths += 1
        if was_ready:
            self._ready_deaths.append(now)
        else:
            self._failed_loads += 1
        if permanent or self._too_often(now):
            return GiveUp(self._rules.half_open)
        return Again(self._delay())

    def forgive(self) -> None:
        """Forget all deaths: an operator asked, or it was healthy for long."""
        self._ready_deaths.clear()
        self._failed_loads = self._deaths = 0

    def _too_often(self, now: float) -> bool:
        while self._ready_deaths and self._ready_deaths[0] <= now - self._rules.ready_window:
            self._ready_deaths.popleft()
        return len(self._ready_deaths) > self._rules.ready_restarts or self._failed_loads >= self._rules.failed_loads

    def _delay(self) -> float:
        rules = self._rules
        # The exponent is bounded: 2.0 ** 1100 would overflow.
        delay = min(rules.longest_delay, rules.first_delay * 2.0 ** min(self._deaths - 1, 30))
        return delay * (1 + rules.jitter * (2 * self._dice() - 1))
