"""What every key has used, in memory: decided and written down in one step that nothing can come between."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
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
        self._series: dict[tuple[str, Window], _Series] = {}
        self._open: Counter[str] = Counter()
        self._changed: set[Row] = set()
        self._numbers = itertools.count()

    def reserve(self, key: str, limits: Limits, asked: Amounts, *, now: float) -> Ticket:
        """Take ``asked`` or nothing; raises RateLimited or BudgetSpent."""
        if limits.concurrent is not None and self._open[key] >= limits.concurrent:
            raise too_many_open(key, limits.concurrent)
        for window in Window:
            limit = limits.of(window)
            # What cannot be told beforehand still needs something that is left.
            wanted = max(1, asked.of(window))
            if limit is not None and (excess := self._of(key, window, now).excess(limit, wanted, now)):
                raise excess.error(key)
        return self.take(key, limits, asked, now=now)

    def take(self, key: str, limits: Limits, asked: Amounts, *, now: float) -> Ticket:
        """Take ``asked`` whatever the limits say: somebody else has decided."""
        self._open[key] += 1
        for window in Window:
            self._add(key, window, window.bucket(now), asked.of(window))
        standing = self.standing(key, limits, now=now) if limits.is_any else ()
        return Ticket(str(next(self._numbers)), key, asked, now, standing)

    def settle(self, ticket: Ticket, actual: Amounts, *, now: float) -> None:
        """Put what was really used in the place of what was reserved; once per ticket."""
        self._open[ticket.key] -= 1
        for window in Window:
            bucket = window.bucket(ticket.taken_at)
            self._of(ticket.key, window, now)
            if window.leaves_at(bucket) > now:
                self._add(ticket.key, window, bucket, actual.of(window) - ticket.asked.of(window))

    def standing(self, key: str, limits: Limits, *, now: float) -> tuple[Standing, ...]:
        """How the key stands in every window, limited or not."""
        series = [self._of(key, window, now) for window in Window]
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
            (key, window.label, bucket): amount
            for (key, window), series in self._series.items()
            for bucket, amount in series.buckets.items()
        }

    def load(self, rows: Mapping[Row, int]) -> None:
        """Begin with what an earlier process has kept."""
        for key, label, bucket in sorted(rows):
            window = _WINDOWS.get(label)
            if window is not None:
                series = self._series.setdefault((key, window), _Series(window))
                series.add(bucket, rows[key, label, bucket])

    def _of(self, key: str, window: Window, now: float) -> _Series:
        series = self._series.setdefault((key, window), _Series(window))
        series.forget(now)
        return series

    def _add(self, key: str, window: Window, bucket: int, amount: int) -> None:
        if amount:
            self._series.setdefault((key, window), _Series(window)).add(bucket, amount)
            self._changed.add((key, window.label, bucket))

    def _content(self, row: Row) -> int:
        key, label, bucket = row
        return self._series[key, _WINDOWS[label]].buckets.get(bucket, 0)
