"""Pure: may this model be loaded now, who must stop so that it fits, or how long is it worth waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from app.errors import DoesNotFit
from app.offload import OffloadPlan

# Every subset of so many candidates is looked at; beyond that they are taken one by one.
_EXHAUSTIVE = 8
_RECENCY_SECONDS = 60.0
_BUSY_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class SharingRules:
    """Times in seconds: how models that cannot live together take turns.

    A model keeps the memory for ``min_residency`` unless nobody has used it for ``linger``; who has waited ``max_wait``
    no longer waits for a gap: the door of the other is closed and its last answers end.
    """

    min_residency: float = 10.0
    linger: float = 1.0
    max_wait: float = 20.0


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that holds memory; ``idle_seconds`` is 0 while ``users`` requests are in flight."""

    model_id: str
    users: int = 0
    pinned: bool = False
    idle_seconds: float = 0.0
    resident_seconds: float = 0.0
    reload_seconds: float = 1.0

    @property
    def cost(self) -> float:
        """What stopping it costs: the time to load it again, more when it was used lately, most while it is used."""
        recency = 1 / (1 + self.idle_seconds / _RECENCY_SECONDS)
        return (0.1 + self.reload_seconds) * recency * (_BUSY_FACTOR if self.users else 1)


@dataclass(frozen=True, slots=True)
class Go:
    """Load with this plan."""

    plan: OffloadPlan


@dataclass(frozen=True, slots=True)
class Evict:
    """Stop these models first, then ``hoped`` will be possible."""

    model_ids: frozenset[str]
    hoped: OffloadPlan


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again after ``seconds``, or when something changes."""

    seconds: float


Planner = Callable[[frozenset[str]], OffloadPlan]
"""The plan when these models are gone; raises DoesNotFit."""


def choose(
    plan_without: Planner, residents: Sequence[Resident], *, waited_seconds: float, rules: SharingRules
) -> Go | Evict | Wait:
    """What to do for a model that wants to be loaded; raises DoesNotFit when nothing that may be stopped would help."""
    free = [resident for resident in residents if not resident.pinned and is_settled(resident, rules)]
    try:
        now = plan_without(frozenset())
    except DoesNotFit:
        return _make_fit(plan_without, residents, free, waited_seconds=waited_seconds, rules=rules)
    if not free:
        return Go(now)
    best = plan_without(_ids(free))
    if as_good(now, best):
        return Go(now)
    chosen = victims(free, lambda ids: as_good(plan_without(ids), best))
    return Evict(chosen, best) if chosen else Go(now)


def _make_fit(
    plan_without: Planner,
    residents: Sequence[Resident],
    free: Sequence[Resident],
    *,
    waited_seconds: float,
    rules: SharingRules,
) -> Go | Evict | Wait:
    evictable = [resident for resident in residents if not resident.pinned]
    plan_without(_ids(evictable))
    candidates = evictable if waited_seconds >= rules.max_wait else free
    chosen = victims(candidates, lambda ids: _fits(plan_without, ids))
    if chosen is not None:
        return Evict(chosen, plan_without(chosen))
    return Wait(_next_moment(evictable, waited_seconds=waited_seconds, rules=rules))


def victims(residents: Sequence[Resident], enough: Callable[[frozenset[str]], bool]) -> frozenset[str] | None:
    """The cheapest set of ``residents`` whose end is ``enough``; None when even all of them are not."""
    if not enough(_ids(residents)):
        return None
    if len(residents) > _EXHAUSTIVE:
        return _greedy(residents, enough)
    subsets = [subset for size in range(len(residents) + 1) for subset in combinations(residents, size)]
    subsets.sort(key=lambda subset: (sum(resident.cost for resident in subset), len(subset)))
    return next(ids for ids in map(_ids, subsets) if enough(ids))


def is_settled(resident: Resident, rules: SharingRules) -> bool:
    """Nobody uses it, and it has had its turn."""
    return resident.users == 0 and (
        resident.idle_seconds >= rules.linger or resident.resident_seconds >= rules.min_residency
    )


def as_good(plan: OffloadPlan, other: OffloadPlan) -> bool:
    """Whether ``plan`` has as much of the model on devices as ``other``."""
    mine, theirs = plan.placement, other.placement
    return mine.gpu_layers >= theirs.gpu_layers and mine.cpu_moe_layers <= theirs.cpu_moe_layers


def _greedy(residents: Sequence[Resident], enough: Callable[[frozenset[str]], bool]) -> frozenset[str]:
    """Drop the dearest while the rest is still enough."""
    kept = list(residents)
    for resident in sorted(residents, key=lambda each: -each.cost):
        without = [each for each in kept if each is not resident]
        if enough(_ids(without)):
            kept = without
    return _ids(kept)


def _next_moment(evictable: Sequence[Resident], *, waited_seconds: float, rules: SharingRules) -> float:
    moments = [rules.max_wait - waited_seconds]
    for resident in evictable:
        if resident.users == 0 and not is_settled(resident, rules):
            moments.append(min(rules.linger - resident.idle_seconds, rules.min_residency - resident.resident_seconds))
    return max(0.02, min((moment for moment in moments if moment > 0), default=0.02))


def _fits(plan_without: Planner, ids: frozenset[str]) -> bool:
    try:
        plan_without(ids)
    except DoesNotFit:
        return False
    return True


def _ids(residents: Sequence[Resident]) -> frozenset[str]:
    return frozenset(resident.model_id for resident in residents)
