"""How often a value fell where, per label.

The library's histogram takes 2 µs to observe a value and 4 µs to hand out each of its series, at ten observations per
request and a thousand series. All of ours happens on one thread, so it needs no lock either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Distribution:
    """Counts of the values that were at most each bound, and their sum; the last count has no bound."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Histogram:
    """One distribution per value of its only label."""

    def __init__(self, name: str, about: str, *, label: str, buckets: Sequence[float]) -> None:
        self.name = name
        self.about = about
        self._label = label
        self._bounds = tuple(float(bound) for bound in buckets)
        self._distributions: dict[str, Distribution] = {}
        self._heads: dict[str, tuple[str, ...]] = {}

    def labels(self, value: str) -> Distribution:
        """The distribution for a value of the label."""
        found = self._distributions.get(value)
        if found is None:
            found = self._distributions[value] = Distribution(self._bounds)
        return found

    def series(self, value: str) -> Iterator[tuple[str, float]]:
        """Name with labels, and number, of every series for a value of the label, as exposed."""
        one = self._distributions[value]
        return zip(self._names(value), [*accumulate(one.counts), one.count, one.sum], strict=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._distributions)

    def _names(self, value: str) -> tuple[str, ...]:
        """Written out once: it is most of the work."""
        names = self._heads.get(value)
        if names is None:
            label = f'{self._label}="{escaped(value)}"'
            bounds = [repr(bound) for bound in self._bounds] + ["+Inf"]
            buckets = (f'{self.name}_bucket{{{label},le="{bound}"}}' for bound in bounds)
            names = self._heads[value] = (*buckets, f"{self.name}_count{{{label}}}", f"{self.name}_sum{{{label}}}")
        return names


def escaped(text: str) -> str:
    """A label's value between its quotes."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
