"""Whether a server that failed is worth asking: pure but for the clock that is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Circuit(StrEnum):
    """CLOSED: requests pass. OPEN: none does, until a pause is over. HALF_OPEN: one at a time, as a trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """So many failures in a row open the circuit; times in seconds, the pause doubles with each failed trial."""

    failures: int = 3
    first_pause: float = 5.0
    longest_pause: float = 60.0


class Breaker:
    """Counts failures in a row; ``now`` is any clock that never goes back."""

    def __init__(self, now: Callable[[], float], rules: BreakerRules | None = None) -> None:
        self._now = now
        self._rules = rules or BreakerRules()
        self._failures = 0
        self._pauses = 0
        self._open_until: float | None = None
        self._is_tried = False
        self._was_reached = True

    @property
    def circuit(self) -> Circuit:
        """Where it stands now; OPEN becomes HALF_OPEN by time alone."""
        if self._open_until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if self._now() < self._open_until else Circuit.HALF_OPEN

    @property
    def retry_seconds(self) -> float:
        """When it is worth asking again."""
        return 0.0 if self._open_until is None else max(1.0, self._open_until - self._now())

    def enter(self) -> bool:
        """Whether a request may be sent; each that may ends in ``succeeded``, ``failed`` or ``left``."""
        if self.circuit is Circuit.HALF_OPEN and not self._is_tried:
            self._is_tried = True
            return True
        return self.circuit is Circuit.CLOSED

    def left(self) -> None:
        """A request was given up by its client: that says nothing of the server."""
        self._is_tried = False

    def succeeded(self) -> None:
        """The server did as it should: all is forgiven."""
        self._failures = self._pauses = 0
        self._open_until, self._is_tried, self._was_reached = None, False, True

    def answered(self) -> None:
        """The server answered a question about its health, which makes up for not having been reached, no more."""
        if not self._was_reached:
            self.succeeded()

    def failed(self, *, was_reached: bool = True) -> None:
        """The server broke off or said that it is at fault, or could not even be reached."""
        circuit = self.circuit
        self._is_tried, self._was_reached = False, was_reached
        self._failures += 1
        if circuit is Circuit.HALF_OPEN or (circuit is Circuit.CLOSED and self._failures >= self._rules.failures):
            pause = self._rules.first_pause * 2.0 ** min(self._pauses, 30)
            self._open_until = self._now() + min(pause, self._rules.longest_pause)
            self._pauses += 1
