"""The last two minutes of every model in numbers: what the plots are drawn from. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEPT_SECONDS = 120
# Samples further apart than this had nobody who looked in between.
_GAP_SECONDS = 2.5


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens that a model has ever read and generated, and its slots and queue now."""

    prompt_tokens: float
    answer_tokens: float
    busy: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Point:
    """One second; tokens per second since the point before."""

    answer_rate: float
    prompt_rate: float
    busy: int
    waiting: int


class History:
    """Points by model, oldest first; None where nobody looked."""

    def __init__(self) -> None:
        self._points: dict[str, deque[Point | None]] = {}
        self._last: Mapping[str, Totals] = {}
        self._last_at: float | None = None

    def add(self, at: float, totals: Mapping[str, Totals]) -> None:
        """The totals at a time in seconds that never goes back."""
        seconds = None if self._last_at is None else at - self._last_at
        if seconds is not None and seconds > 0:
            self._skip(round(seconds) - 1 if seconds > _GAP_SECONDS else 0)
            for name, now in totals.items():
                if (before := self._last.get(name)) is not None:
                    self._of(name).append(_point(before, now, seconds))
        for name in [name for name in self._points if name not in totals]:
            del self._points[name]
        self._last, self._last_at = totals, at

    def of(self, name: str) -> list[Point | None]:
        """The points of a model."""
        return list(self._points.get(name, ()))

    def latest(self, name: str) -> Point | None:
        """The newest point of a model; None when there is no fresh one."""
        points = self._points.get(name)
        return points[-1] if points else None

    def _of(self, name: str) -> deque[Point | None]:
        return self._points.setdefault(name, deque(maxlen=KEPT_SECONDS))

    def _skip(self, seconds: int) -> None:
        for points in self._points.values():
            points.extend(_nothing(min(seconds, KEPT_SECONDS)))


def sums(series: Sequence[Sequence[Point | None]]) -> list[Point | None]:
    """Several models together, second by second; the newest points belong together."""
    length = max((len(points) for points in series), default=0)
    aligned = [[*_nothing(length - len(points)), *points] for points in series]
    return [_sum(column) for column in zip(*aligned, strict=True)]


def _nothing(seconds: int) -> list[Point | None]:
    return [None] * seconds


def _point(before: Totals, now: Totals, seconds: float) -> Point:
    return Point(
        max(0.0, now.answer_tokens - before.answer_tokens) / seconds,
        max(0.0, now.prompt_tokens - before.prompt_tokens) / seconds,
        now.busy,
        now.waiting,
    )


def _sum(column: tuple[Point | None, ...]) -> Point | None:
    known = [point for point in column if point is not None]
    if not known:
        return None
    return Point(
        sum(point.answer_rate for point in known),
        sum(point.prompt_rate for point in known),
        sum(point.busy for point in known),
        sum(point.waiting for point in known),
    )
