"""A plan that the engine has confirmed: made, asked about, corrected once, made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from app.errors import DoesNotFit
from app.memory import (
    AccountedMemory,
    Accounting,
    Correction,
    Family,
    MemoryLedger,
    MemoryModel,
    Placement,
    correction_of,
)
from app.offload.host import PROCESS_BYTES, fit_caches
from app.offload.plan import OffloadPlan, Reason, mib
from app.offload.planner import plan_of
from app.offload.verified import Verified

Make = Callable[[Correction], OffloadPlan]
"""Plans under a correction; raises DoesNotFit."""
Ask = Callable[[OffloadPlan], Accounting | str]
"""What the engine says of a plan, or a sentence on why it says nothing."""

# The first answer corrects the formulas; if the plan then made does not hold either, its answer is the last one used.
_MOST_QUESTIONS = 3
_TOO_MUCH = "The engine counts more than may be used, whatever was tried."
_REFUSED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Asks about plans until one holds.

    ``families`` must be the formulas that the plans are made with.
    """

    make: Make
    ask: Ask
    families: Mapping[str, Family]

    def plan(self, known: Correction) -> OffloadPlan:
        """A plan with the engine's word on it, or with a finding. Raises DoesNotFit when the engine's word forbids all.

        Starts from what is ``known`` of this engine and model. When a corrected plan is no better than one that the
        engine has already confirmed, that one is kept.
        """
        plan = self.make(known)
        confirmed: OffloadPlan | None = None
        asked: list[Placement] = []
        for corrections in range(_MOST_QUESTIONS):
            heard = self.ask(plan)
            if isinstance(heard, str):
                return confirmed or _unverified(plan, heard)
            asked.append(plan.placement)
            if holds(plan, heard):
                correction = correction_of(self._by_formulas(plan), heard)
                if confirmed is None or _on_devices(plan) > _on_devices(confirmed):
                    confirmed = self._confirmed(self._recounted(plan, correction), heard, corrections)
            else:
                # Every MiB counts now, even one that may be rounding.
                correction = correction_of(self._by_formulas(plan), heard, noise_bytes=0)
            better = self._better(correction, confirmed)
            if any(_same_question(better.placement, before) for before in asked):
                break
            plan = better
        return confirmed or _unverified(plan, _TOO_MUCH)

    def _better(self, correction: Correction, confirmed: OffloadPlan | None) -> OffloadPlan:
        """The plan under what was just learned; what is already confirmed when that leaves none."""
        try:
            return self.make(correction)
        except DoesNotFit:
            if confirmed is None:
                raise
            return confirmed

    def _recounted(self, plan: OffloadPlan, correction: Correction) -> OffloadPlan:
        """``plan`` with the ledger as the engine counts it, and the caches in RAM that this leaves room for."""
        model = MemoryModel(
            plan.model,
            mmproj=plan.mmproj,
            draft=plan.draft,
            draft_head=plan.placement.draft_head,
            correction=correction,
            families=self.families,
        )
        budget = plan.machine.ram_available_bytes - plan.wish.ram_reserve_bytes
        ledger = model.ledger(plan.placement, device_names=_names(plan))
        # What the engine rounds may be just over the budget here, although it is within by the engine's own figures.
        budget = max(budget, ledger.host.needed_bytes + PROCESS_BYTES)
        placement = fit_caches(model, plan.placement, ledger, budget_bytes=budget)
        return plan_of(model, plan.machine, plan.wish, placement, mmproj=plan.mmproj)

    def _confirmed(self, plan: OffloadPlan, accounting: Accounting, corrections: int) -> OffloadPlan:
        why = f"{accounting.by} counted these flags before it read a weight"
        reason = Reason("verified", "after a correction" if corrections else "at once", why)
        refused = _refused(self._by_formulas(plan), accounting)
        return replace(plan, verified=Verified(accounting, corrections), reasons=(*plan.reasons, *refused, reason))

    def _by_formulas(self, plan: OffloadPlan) -> MemoryLedger:
        """Without projector and draft model, which the engine counts apart."""
        model = MemoryModel(plan.model, draft_head=plan.placement.draft_head, families=self.families)
        return model.uncorrected(plan.placement, device_names=_names(plan))


def _names(plan: OffloadPlan) -> list[str]:
    return [device.name for device in plan.machine.devices]


def _refused(formulas: MemoryLedger, accounting: Accounting) -> Iterator[Reason]:
    """Said when a device takes much less than it was given: the engine leaves there what the device cannot compute."""
    for device in formulas.devices:
        given = device.weights_bytes + device.experts_bytes
        taken = accounting.device(device.name).weights_bytes
        if taken < _REFUSED_SHARE * given:
            why = f"the engine keeps {mib(given - taken)} of its weights in RAM: this device cannot take those tensors"
            yield Reason("device", device.name, why)


def holds(plan: OffloadPlan, accounting: Accounting) -> bool:
    """Whether what the engine says of a plan stays within every budget."""
    mmproj = accounting.mmproj_bytes or 0
    draft = accounting.draft or Accounting("", (), AccountedMemory("host"))
    for device in plan.machine.devices:
        projector = mmproj if plan.placement.mmproj_on == device.name else 0
        budget = max(0, device.free_bytes - plan.wish.vram_reserve_bytes)
        beside = projector + draft.device(device.name).total_bytes
        if accounting.device(device.name).total_bytes + beside > budget:
            return False
    needed = plan.memory.host.needed_bytes if not accounting.exact_host else accounting.host.total_bytes
    needed += draft.host.total_bytes if accounting.exact_host else 0
    needed += mmproj if plan.placement.mmproj_on == "host" else 0
    return needed + PROCESS_BYTES <= plan.machine.ram_available_bytes - plan.wish.ram_reserve_bytes


def _on_devices(plan: OffloadPlan) -> tuple[int, int]:
    return plan.placement.gpu_layers, -plan.placement.cpu_moe_layers


def _same_question(one: Placement, other: Placement) -> bool:
    """Whether the engine would account for both alike: caches in RAM and the way to load are not in its figures."""
    return replace(one, cache_ram_mib=0, context_checkpoints=0, load_mode="") == replace(
        other, cache_ram_mib=0, context_checkpoints=0, load_mode=""
    )


def with_word(plan: OffloadPlan, heard: Accounting | str) -> OffloadPlan:
    """``plan`` as it is, with what the engine says of it: its figures, or a sentence on why there are none."""
    if isinstance(heard, str):
        return _unverified(plan, heard)
    reason = Reason("verified", "after a step down", f"{heard.by} counted these flags before it read a weight")
    return replace(plan, verified=Verified(heard), reasons=(*plan.reasons, reason))


def _unverified(plan: OffloadPlan, finding: str) -> OffloadPlan:
    return replace(plan, finding=finding, reasons=(*plan.reasons, Reason("verified", "no", finding)))
