"""Does a ready engine still work? ``/health`` answers while inference hangs, so progress is the heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.engine.endpoint import Endpoint
from app.engine.health import HealthProbe

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an engine may be silent, in seconds: while it loads, within an answer, and when asked for its health."""

    stall_seconds: float = 75.0
    silence_seconds: float = 75.0
    probe_interval_seconds: float = 10.0
    probe_timeout_seconds: float = 5.0
    missed_probes: int = 3

    @property
    def tick_seconds(self) -> float:
        """How often it is looked at."""
        return min(self.probe_interval_seconds, self.silence_seconds / 15)


class Flight:
    """One request that the engine works on.

    ``chunks`` counts what it sent; ``is_awaited`` is False while the client takes its time with what has come.
    """

    __slots__ = ("_looked_at_chunks", "chunks", "is_awaited", "silent_since")

    def __init__(self, now: float) -> None:
        self.chunks = 0
        self.is_awaited = True
        self.silent_since = now
        self._looked_at_chunks = 0

    def look(self, now: float) -> bool:
        """Whether it has made progress since the last look, or could not because of its client."""
        moved = self.chunks != self._looked_at_chunks
        self._looked_at_chunks = self.chunks
        if moved or not self.is_awaited:
            self.silent_since = now
        return moved


class Liveness:
    """Watches one engine; calls ``on_hang`` once when it no longer works."""

    def __init__(self, endpoint: Endpoint, patience: Patience, *, on_hang: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._patience = patience
        self._on_hang = on_hang
        self._loop = asyncio.get_running_loop()
        self._flights: set[Flight] = set()
        self._missed = 0

    @contextmanager
    def flight(self) -> Iterator[Flight]:
        """A request from its sending to its end."""
        flight = Flight(self._loop.time())
        self._flights.add(flight)
        try:
            yield flight
        finally:
            self._flights.discard(flight)

    async def watch(self) -> None:
        """Until it hangs; meant to be cancelled."""
        patience = self._patience
        async with HealthProbe(self._endpoint, timeout_seconds=patience.probe_timeout_seconds) as probe:
            probe_at = looked_at = self._loop.time()
            while True:
                await asyncio.sleep(patience.tick_seconds)
                now = self._loop.time()
                if now - looked_at > 2 * patience.tick_seconds + patience.probe_timeout_seconds:
                    # It was us who stood still: a suspended machine, a debugger.
                    self._forgive(now)
                looked_at = now
                hang = self._look(now)
                if hang is None and now - probe_at >= patience.probe_interval_seconds:
                    hang, probe_at = await self._probe(probe), now
                if hang is not None:
                    _log.warning("the engine hangs: %s", hang)
                    self._on_hang()
                    return

    def _look(self, now: float) -> str | None:
        moved = [flight.look(now) for flight in self._flights]
        if any(moved):
            self._missed = 0
        limit = self._patience.silence_seconds
        silent = sum(now - flight.silent_since > limit for flight in self._flights)
        return f"no progress of {silent} requests for {limit:g} s" if silent else None

    async def _probe(self, probe: HealthProbe) -> str | None:
        if await probe.answers():
            self._missed = 0
            return None
        self._missed += 1
        return f"{self._missed} health probes missed" if self._missed >= self._patience.missed_probes else None

    def _forgive(self, now: float) -> None:
        self._missed = 0
        for flight in self._flights:
            flight.silent_since = now
