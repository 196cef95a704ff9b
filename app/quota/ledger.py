"""What every key has used, in memory: decided and written down in one step that nothing can come between."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from app.quota.limits import Amounts, Limits, Window
from app.quota.refusals import Excess, too_many_open

# key, label of the window, bucket
Row = tuple[str, str, int]

_WINDOWS = {window.label: window for window in Window}


@dataclass(frozen=True, slots=True)
class Standing:
    """What of a limit is used, in the window's unit; ``resets_in_seconds`` until nothing of it is."""

    window: Window
    limit: int | None
    spent: int
    resets_in_seconds: float

    @property
    def remaining(self) -> int | None:
        """What is left, None without a limit."""
        return None if self.limit is None else max(0, self.limit - self.spent)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A reservation: what was taken, and when; ``standing`` is how the key stood right after."""

    id: str
    key: str
    asked: Amounts
    taken_at: float
    standing: tuple[Standing, ...] = ()


@dataclass(slots=True)
class _Series:
    """Use of one key in one window; the buckets are in order of time."""

    window: Window
    buckets: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def forget(self, now: float) -> None:
        """Drop what has left the window."""
        oldest = self.window.bucket(now) - self.window.buckets
        while self.buckets and (first := next(iter(self.buckets))) <= oldest:
            self.total -= self.buckets.pop(first)

    def add(self, bucket: int, amount: int) -> int:
        """Change a bucket by ``amount``, never below nothing; its new content."""
        before = self.buckets.get(bucket, 0)
        after = max(0, before + amount)
        is_late = bucket not in self.buckets and bool(self.buckets) and bucket < next(reversed(self.buckets))
        self.buckets[bucket] = after
        if is_late:
            self.buckets = dict(sorted(self.buckets.items()))
        self.total += after - before
        return after

    def excess(self, limit: int, wanted: int, now: float) -> Excess | None:
        """Why ``wanted`` more is too much; None when it is not."""
        if self.total + wanted <= limit and limit > 0:
            return None
        return Excess(self.window, limit, self.total, wanted, self._free_in(limit - wanted, now) if limit else None)

    def _free_in(self, target: int, now: float) -> float | None:
        """Seconds until no more than ``target`` is used."""
        if target < 0:
            return None
        total, leaves_at = self.total, now
        for bucket, amount in self.buckets.items():
            if total <= target:
                break
            total -= amount
            leaves_at = self.window.leaves_at(bucket)
        return max(0.0, leaves_at - now)

    def resets_in(self, now: float) -> float:
        """Seconds until nothing is used any more."""
        used = [bucket for bucket, amount in self.buckets.items() if amount]
        return max(0.0, self.window.leaves_at(used[-1]) - now) if used else 0.0


class Ledger:
    """Everything happens on one thread; ``reserve`` decides and takes at once, so that nothing is granted twice."""

    def __init__(self) -> None:
        # Of each key all windows, by their labels.
        self._series: dict[str, dict[str, _Series]] = {}
        self._open: Counter[str] = Counter()
        self._changed: set[Row] = set()
        self._numbers = itertools.count()

    def reserve(self, key: str, limits: Limits, asked: Amounts, *, now: float) -> Ticket:
        """Take ``asked`` or nothing; raises RateLimited or BudgetSpent."""
        if limits.is_any:
            self._refuse_excess(key, limits, asked, now)
        return self.take(key, limits, asked, now=now)

    def take(self, key: str, limits: Limits, asked: Amounts, *, now: float) -> Ticket:
        """Take ``asked`` whatever the limits say: somebody else has decided."""
        self._open[key] += 1
        for series in self._of(key):
            self._add(key, series, series.window.bucket(now), asked.of(series.window))
        standing = self.standing(key, limits, now=now) if limits.is_any else ()
        return Ticket(str(next(self._numbers)), key, asked, now, standing)

    def settle(self, ticket: Ticket, actual: Amounts, *, now: float) -> None:
        """Put what was really used in the place of what was reserved; once per ticket."""
        self._open[ticket.key] -= 1
        for series in self._of(ticket.key):
            window = series.window
            bucket = window.bucket(ticket.taken_at)
            series.forget(now)
            if window.leaves_at(bucket) > now:
                self._add(ticket.key, series, bucket, actual.of(window) - ticket.asked.of(window))

    def standing(self, key: str, limits: Limits, *, now: float) -> tuple[Standing, ...]:
        """How the key stands in every window, limited or not."""
        series = self._of(key)
        for one in series:
            one.forget(now)
        return tuple(Standing(one.window, limits.of(one.window), one.total, one.resets_in(now)) for one in series)

    def open_requests(self, key: str) -> int:
        """Reservations of the key that are not settled yet."""
        return self._open[key]

    def take_changes(self) -> dict[Row, int]:
        """Contents of the buckets changed since the last call."""
        changes = {row: self._content(row) for row in self._changed}
        self._changed.clear()
        return changes

    def put_back(self, rows: Iterable[Row]) -> None:
        """These changes could not be kept: hand them out again."""
        self._changed.update(rows)

    def everything(self) -> dict[Row, int]:
        """All that is known, for a store that has lost it."""
        return {
            (key, label, bucket): amount
            for key, windows in self._series.items()
            for label, series in windows.items()
            for bucket, amount in series.buckets.items()
        }

    def load(self, rows: Mapping[Row, int]) -> None:
        """Begin with what an earlier process has kept."""
        for key, label, bucket in sorted(rows):
            if label in _WINDOWS:
                self._windows(key)[label].add(bucket, rows[key, label, bucket])

    def _refuse_excess(self, key: str, limits: Limits, asked: Amounts, now: float) -> None:
        if limits.concurrent is not None and self._open[key] >= limits.concurrent:
            raise too_many_open(key, limits.concurrent)
        for series in self._of(key):
            limit = limits.of(series.window)
            if limit is None:
                continue
            series.forget(now)
            # What cannot be told beforehand still needs something that is left.
            if excess := series.excess(limit, max(1, asked.of(series.window)), now):
                raise excess.error(key)

    def _windows(self, key: str) -> dict[str, _Series]:
        windows = self._series.get(key)
        if windows is None:
            windows = self._series[key] = {label: _Series(window) for label, window in _WINDOWS.items()}
        return windows

    def _of(self, key: str) -> Collection[_Series]:
        return self._windows(key).values()

    def _add(self, key: str, series: _Series, bucket: int, amount: int) -> None:
        if amount:
            series.add(bucket, amount)
            self._changed.add((key, series.window.label, bucket))

    def _content(self, row: Row) -> int:
        key, label, bucket = row
        return self._series[key][label].buckets.get(bucket, 0)
