"""Seconds since 1970 that only ever run forward, at the speed of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ClockMark:
    """A reading that a later process can go on from: the moment, and what the machine's own counter said then."""

    now: float
    steady: float
    boot: str


if sys.platform == "linux":

    def _steady() -> float:
        """Seconds since the machine started, time asleep included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def _steady() -> float:
        """Seconds since the machine started."""
        return time.monotonic()


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class SteadyClock:
    """The wall clock is read once; from then on only a counter moves us, so that no jump ends a window early."""

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = _steady,
        boot: Callable[[], str] = _boot,
    ) -> None:
        self._steady = steady
        self._boot = boot()
        self._offset = wall() - steady()

    def now(self) -> float:
        """Seconds since 1970 by our reckoning."""
        return self._offset + self._steady()

    def mark(self) -> ClockMark:
        """What to keep for the next process."""
        return ClockMark(self.now(), self._steady(), self._boot)

    def resume(self, mark: ClockMark) -> None:
        """Go on from an earlier process: by the counter if the machine has not been started since, else never back."""
        if self._boot and mark.boot == self._boot and mark.steady <= self._steady():
            self._offset = mark.now - mark.steady
        else:
            self._offset = max(self._offset, mark.now - self._steady())
