"""From a model, a machine and a wish to a plan, or to the numbers that forbid it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from app.errors import DeviceMissing, DoesNotFit
from app.gguf import ModelFacts
from app.hardware import Machine
from app.memory import REGISTRY, Correction, Family, KVType, MemoryModel, Placement
from app.offload.base import base_placement, cache_types, with_cache
from app.offload.devices import DeviceSearch
from app.offload.expected import expect
from app.offload.host import fit_caches, fits_ram
from app.offload.plan import OffloadPlan, mib
from app.offload.reasons import explain
from app.offload.wish import Wish


def plan_offload(
    facts: ModelFacts,
    machine: Machine,
    wish: Wish,
    *,
    mmproj: ModelFacts | None = None,
    draft: ModelFacts | None = None,
    correction: Correction | None = None,
    families: Mapping[str, Family] = REGISTRY,
) -> OffloadPlan:
    """Choose every placement flag for ``facts`` on ``machine``.

    Order: all on the devices; else experts of the fewest layers in RAM; else fewer layers. Context and parallel
    requests are kept or refused. ``draft`` is a model that guesses ahead; ``correction`` is what the engine is known to
    count differently. Raises DoesNotFit with the numbers, ModelFileError for an impossible header.
    """
    model = MemoryModel(
        facts, mmproj=mmproj, draft=draft, draft_head=wish.draft_head, correction=correction, families=families
    )
    search = DeviceSearch.over(model, machine.devices, reserve_bytes=wish.vram_reserve_bytes)
    placement = _Planner(model, machine, wish, search).place()
    return plan_of(model, machine, wish, placement, mmproj=mmproj)


def plan_of(
    model: MemoryModel, machine: Machine, wish: Wish, placement: Placement, *, mmproj: ModelFacts | None = None
) -> OffloadPlan:
    """A placement with its bytes, its reasons and what to expect of it."""
    ledger = model.ledger(placement, device_names=[device.name for device in machine.devices])
    return OffloadPlan(
        model=model.shape.facts,
        machine=machine,
        placement=placement,
        memory=ledger,
        expected=expect(model, placement, ledger),
        reasons=explain(model, machine, wish, placement),
        wish=wish,
        mmproj=mmproj,
        draft=model.draft.shape.facts if model.draft is not None else None,
        correction=model.correction,
    )


_MIB = 1 << 20
# The engine refuses a cache that does not hold the experts of one token, and one that just does keeps nothing.
_LEAST_CACHED_TOKENS = 2
_ROUNDING_BYTES = 16 * _MIB
_LARGER_UBATCHES = (2048, 1024)


@dataclass(frozen=True, slots=True)
class _Planner:
    model: MemoryModel
    machine: Machine
    wish: Wish
    search: DeviceSearch

    @property
    def ram_budget_bytes(self) -> int:
        return self.machine.ram_available_bytes - self.wish.ram_reserve_bytes

    def place(self) -> Placement:
        """The chosen placement with caches in RAM. Raises DoesNotFit."""
        self._check_devices()
        base = base_placement(self.model, self.machine, self.wish)
        chosen = self._choose_cache_type(base)
        if self.wish.require_gpu and not chosen.gpu_layers:
            raise self._refuse(replace(chosen, gpu_layers=1, cpu_moe_layers=self.model.shape.blocks), "require_gpu")
        chosen = self._with_expert_cache(self._with_larger_ubatch(chosen))
        return fit_caches(self.model, chosen, self.search.ledger(chosen), budget_bytes=self.ram_budget_bytes)

    def _check_devices(self) -> None:
        wanted = "require_gpu" if self.wish.require_gpu else "gpu_layers" if self.wish.gpu_layers else None
        if wanted and not self.machine.devices:
            unseen = ", ".join(self.machine.unseen_devices)
            although = f" although this machine has {unseen}" if unseen else ""
            raise DeviceMissing(
                f"{wanted} asks for a device but the engine sees none{although}: check driver and engine build with "
                "`llama-gateway doctor`, or take that setting away.",
                numbers={"devices": 0},
            )

    def _choose_cache_type(self, base: Placement) -> Placement:
        """f16 when it costs no layer against q8_0; q4_0 unasked only when nothing else fits into RAM."""
        kinds = cache_types(self.model, self.wish)
        if len(kinds) == 1:
            return self._with_cache_type(base, kinds[0])
        precise, compact = (self._with_cache_type(base, kind) for kind in kinds[:2])
        if _notch(precise) == _notch(compact) and self._in_ram(precise):
            return precise
        return compact if self._in_ram(compact) else self._with_cache_type(base, kinds[-1])

    def _with_cache_type(self, base: Placement, kind: KVType) -> Placement:
        """The best placement with this cache; projector and draft model come last and never cost a layer."""
        base = with_cache(base, kind)
        placed = self._on_devices(base)
        if placed is None:
            wished = "cpu_moe_layers" if self.wish.gpu_layers is None else "gpu_layers"
            raise self._refuse(self._exact(base), wished)
        if self.model.mmproj_bytes:
            placed = self._beside(placed, base, lambda one, where: replace(one, mmproj_on=where))
        if self.model.draft is not None:
            base = replace(base, mmproj_on=placed.mmproj_on)
            placed = self._beside(placed, base, lambda one, where: replace(one, draft_on=where))
        return placed

    def _beside(self, placed: Placement, base: Placement, put: Callable[[Placement, str], Placement]) -> Placement:
        """``placed`` with a further part on the first device where that costs no layer, else in RAM."""
        for name in self.search.names if placed.gpu_layers else ():
            beside = self._on_devices(put(base, name))
            if beside is not None and _notch(beside) == _notch(placed):
                return beside
        return put(placed, "host")

    def _with_larger_ubatch(self, placement: Placement) -> Placement:
        """What is left on the devices and too little for another layer makes long prompts faster.

        With large batches the devices compute what lies in RAM too, and copy it once for each ubatch.
        """
        copies = placement.cpu_moe_layers or placement.gpu_layers < self.model.all_layers
        if not placement.gpu_layers or not copies or self.wish.embedding:
            return placement
        for ubatch in _LARGER_UBATCHES:
            larger = self.search.place(replace(placement, ubatch=ubatch))
            if larger is not None and self._in_ram(larger):
                return larger
        return placement

    def _with_expert_cache(self, placement: Placement) -> Placement:
        """What is left then keeps the experts that are used most, if it holds those of a few tokens."""
        all_else = placement.cpu_moe_layers and placement.gpu_layers == self.model.all_layers
        if not self.wish.moe_cache or not all_else or len(self.search.names) != 1:
            return placement
        ledger = self.search.ledger(placement)
        left = self.search.budgets[0] - ledger.devices[0].total_bytes - _ROUNDING_BYTES
        if left < _LEAST_CACHED_TOKENS * self.model.token_experts_bytes(placement):
            return placement
        return replace(placement, moe_cache_mib=min(left, ledger.host.experts_bytes) // _MIB)

    def _on_devices(self, base: Placement) -> Placement | None:
        """The best placement, or exactly the wished one, or None when that does not fit."""
        if self.wish.gpu_layers is None and self.wish.cpu_moe_layers is None:
            return self.search.best(base)
        exact = self._exact(base)
        return self.search.place(exact) if exact.gpu_layers else exact

    def _exact(self, base: Placement) -> Placement:
        """What the operator asked for; numbers above the model's mean all, as for the engine."""
        everything = self.model.all_layers if self.machine.devices else 0
        wished = self.wish.gpu_layers
        return replace(
            base,
            gpu_layers=everything if wished is None else min(max(0, wished), everything),
            cpu_moe_layers=min(max(0, self.wish.cpu_moe_layers or 0), self.model.shape.blocks),
        )

    def _in_ram(self, placement: Placement) -> bool:
        return fits_ram(self.search.ledger(placement), budget_bytes=self.ram_budget_bytes)

    def _refuse(self, placement: Placement, setting: str) -> DoesNotFit:
        """The refusal of a placement that was demanded by ``setting``."""
        even = replace(placement, tensor_split=tuple(float(budget) for budget in self.search.budgets))
        needed = sum(device.total_bytes for device in self.search.ledger(even).devices)
        budget = sum(self.search.budgets)
        experts = f" and experts of {placement.cpu_moe_layers} layers in RAM" if self.model.has_experts else ""
        return DoesNotFit(
            f"{self.model.shape.facts.name} does not fit as {setting} asks: {placement.gpu_layers} of "
            f"{self.model.all_layers} layers on {' + '.join(self.search.names)}{experts} need {mib(needed)} there, but "
            f"only {mib(budget)} may be used: set offload to auto, or take a smaller context or model.",
            numbers={"device_needed_bytes": needed, "device_budget_bytes": budget},
        )


def _notch(placement: Placement) -> tuple[int, int]:
    return placement.gpu_layers, placement.cpu_moe_layers
