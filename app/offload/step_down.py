"""After an engine ran out of memory: the next smaller plan, least loss first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from app.errors import DoesNotFit
from app.hardware import Machine
from app.memory import REGISTRY, Family, MemoryLedger, MemoryModel, Placement
from app.offload.base import cache_types, with_cache
from app.offload.devices import DeviceSearch
from app.offload.host import PROCESS_BYTES, fit_caches
from app.offload.plan import OffloadPlan, Reason, mib
from app.offload.planner import plan_of

MOST_STEPS = 6
"""Smaller plans that are tried; then something else than a setting is wrong."""

# Prompts of 256 tokens a time still use a device well; below that most of its work is copying.
_UBATCHES = (512, 256)
_LAYERS_AT_ONCE = 2
_LEAST_CONTEXT = 1024
_NOISE_BYTES = 64 << 20


class Shortage(StrEnum):
    """Which memory ran out, and when."""

    DEVICE = "the device ran out of memory"
    RAM_AT_LOAD = "the system ran out of RAM while it loaded"
    RAM_IN_USE = "the system ran out of RAM"


def step_down(
    plan: OffloadPlan, shortage: Shortage, *, families: Mapping[str, Family] = REGISTRY
) -> OffloadPlan | None:
    """The plan that takes less of what ran out and loses least by it; None when that was tried often enough.

    In this order: no experts kept twice, smaller ubatches, no caches in RAM, the projector in RAM, no draft, experts of
    two more layers in RAM or two layers fewer on the devices, a smaller cache type, and half of the context where the
    wish allows it. What the wish fixes stays. No memory is taken elsewhere that is not within its budget.
    """
    if len(plan.steps) >= MOST_STEPS:
        return None
    model = MemoryModel(
        plan.model,
        mmproj=plan.mmproj,
        draft=plan.draft,
        draft_head=plan.placement.draft_head,
        correction=plan.correction,
        families=families,
    )
    alone = MemoryModel(plan.model, mmproj=plan.mmproj, correction=plan.correction, families=families)
    return next(_Stairs(plan, model, alone, shortage).smaller(), None)


def missing(now: Machine, before: Machine) -> Mapping[str, int]:
    """Bytes by device that were free ``before`` and are not ``now``; small differences come and go by themselves."""
    free = {device.name: device.free_bytes for device in now.devices}
    gone = {device.name: device.free_bytes - free.get(device.name, 0) for device in before.devices}
    return {name: size for name, size in gone.items() if size > _NOISE_BYTES}


def replanned(
    plan: OffloadPlan, fresh: OffloadPlan, taken: Mapping[str, int], *, holders: str = ""
) -> OffloadPlan | None:
    """``fresh``, made for what others left, as a step down from ``plan``; None if it is none or was the last one.

    ``holders`` names them, where anybody knows.
    """
    devices = {device.name: device.total_bytes for device in plan.memory.devices}
    now = {device.name: device.total_bytes for device in fresh.memory.devices}
    if len(plan.steps) >= MOST_STEPS or any(size > devices.get(name, 0) for name, size in now.items()):
        return None
    if sum(now.values()) >= sum(devices.values()):
        return None
    number = len(plan.steps) + 1
    others = ", ".join(f"{mib(size)} of {name}" for name, size in taken.items())
    because = f"step {number} of at most {MOST_STEPS}: other programs took that"
    step = Reason("free memory", f"less {others}", f"{because}: {holders}" if holders else because)
    return replace(fresh, steps=(*plan.steps, step), reasons=(*fresh.reasons, step))


@dataclass(frozen=True, slots=True)
class _Stairs:
    """``alone`` is the model without its draft."""

    plan: OffloadPlan
    model: MemoryModel
    alone: MemoryModel
    shortage: Shortage

    def smaller(self) -> Iterator[OffloadPlan]:
        """Smaller plans, the one that loses least first."""
        for setting, candidate in self._candidates():
            placement = self._settled(candidate)
            if placement is not None and self._helps(self._ledger(placement), placement):
                yield self._plan(placement, setting)

    def _candidates(self) -> Iterator[tuple[str, Placement]]:
        """(what is changed, placement) in the order of their loss."""
        now, wish = self.plan.placement, self.plan.wish
        if now.moe_cache_mib:
            yield "moe_cache_mib", replace(now, moe_cache_mib=0)
        if now.load_mode == "none":
            yield "load_mode", replace(now, load_mode="mmap")
        if not now.embedding:
            yield from (("ubatch", replace(now, ubatch=size)) for size in _UBATCHES if size < now.ubatch)
        yield "cache_ram_mib", replace(now, cache_ram_mib=0)
        yield "context_checkpoints", replace(now, context_checkpoints=0)
        if now.mmproj_on not in {None, "host"}:
            yield "mmproj_on", replace(now, mmproj_on="host")
        if now.draft_tokens:
            yield "draft_tokens", replace(now, draft_tokens=0, draft_head=False, draft_on=None)
        if wish.gpu_layers is None and wish.cpu_moe_layers is None:
            yield from self._with_fewer_layers(now)
        kinds = cache_types(self.model, wish)
        for kind in kinds[kinds.index(now.kv_cache_k) + 1 :]:
            yield "kv_cache_k", with_cache(now, kind)
        if wish.allow_smaller_context and not now.embedding and now.context_per_request >= 2 * _LEAST_CONTEXT:
            yield "context_per_request", replace(now, context_per_request=now.context_per_request // 2)

    def _with_fewer_layers(self, now: Placement) -> Iterator[tuple[str, Placement]]:
        """Two at a time; more when the buffers that come with layers in RAM take all of what that frees."""
        blocks = self.model.shape.blocks
        if self.model.has_experts and now.gpu_layers:
            for more in range(now.cpu_moe_layers + _LAYERS_AT_ONCE, blocks + _LAYERS_AT_ONCE, _LAYERS_AT_ONCE):
                yield "cpu_moe_layers", replace(now, cpu_moe_layers=min(more, blocks))
        least = 1 if self.plan.wish.require_gpu else 0
        for fewer in range(now.gpu_layers - _LAYERS_AT_ONCE, least - _LAYERS_AT_ONCE, -_LAYERS_AT_ONCE):
            yield "gpu_layers", replace(now, gpu_layers=max(fewer, least), moe_cache_mib=0)

    def _settled(self, candidate: Placement) -> Placement | None:
        """``candidate`` with its layers shared among the devices and caches that RAM has room for, or None."""
        if not candidate.gpu_layers and self.plan.placement.gpu_layers:
            mmproj_on = "host" if candidate.mmproj_on else None
            draft_on = "host" if candidate.draft_on else None
            candidate = replace(
                candidate, cpu_moe_layers=0, moe_cache_mib=0, tensor_split=(), mmproj_on=mmproj_on, draft_on=draft_on
            )
        elif candidate.tensor_split:
            before = tuple(device.total_bytes for device in self.plan.memory.devices)
            placed = DeviceSearch(self._model(candidate), self._names, before).place(candidate)
            if placed is None:
                return None
            candidate = placed
        return self._with_caches(candidate)

    def _with_caches(self, candidate: Placement) -> Placement | None:
        """No cache in RAM grows, and what has to be in RAM stays within its budget."""
        budget = self.plan.machine.ram_available_bytes - self.plan.wish.ram_reserve_bytes
        # What already runs may be a little over it, by the engine's own rounding.
        budget = max(budget, self.plan.memory.host.needed_bytes + PROCESS_BYTES)
        try:
            room = fit_caches(self._model(candidate), candidate, self._ledger(candidate), budget_bytes=budget)
        except DoesNotFit:
            return None
        return replace(
            candidate,
            cache_ram_mib=min(candidate.cache_ram_mib, room.cache_ram_mib),
            context_checkpoints=min(candidate.context_checkpoints, room.context_checkpoints),
            load_mode=room.load_mode if room.load_mode == "mmap" else candidate.load_mode,
        )

    def _helps(self, ledger: MemoryLedger, placement: Placement) -> bool:
        """Whether it takes less of what ran out, and on no device more."""
        pairs = zip(ledger.devices, self.plan.memory.devices, strict=True)
        if any(after.total_bytes > before.total_bytes for after, before in pairs):
            return False
        if self.shortage is Shortage.DEVICE:
            return _on_devices(ledger) < _on_devices(self.plan.memory)
        if ledger.host.total_bytes > self.plan.memory.host.total_bytes:
            return False
        return self._held(ledger, placement) < self._held(self.plan.memory, self.plan.placement)

    def _held(self, ledger: MemoryLedger, placement: Placement) -> int:
        """RAM that the kernel cannot take back; caches are still empty while a model loads."""
        host = ledger.host
        held = host.needed_bytes if self.shortage is Shortage.RAM_AT_LOAD else host.total_bytes
        return held - (host.weights_bytes + host.experts_bytes if placement.load_mode == "mmap" else 0)

    def _plan(self, placement: Placement, setting: str) -> OffloadPlan:
        before = self.plan
        number = len(before.steps) + 1
        old, new = _value(before.placement, setting), _value(placement, setting)
        because = f"step {number} of at most {MOST_STEPS} down from {old}: with that {self.shortage.value}"
        steps = (*before.steps, Reason(setting, new, because))
        stepped = plan_of(self._model(placement), before.machine, before.wish, placement, mmproj=before.mmproj)
        lowered = {step.setting: step for step in steps}
        shown = {reason.setting for reason in stepped.reasons}
        reasons = [lowered.get(reason.setting, reason) for reason in stepped.reasons]
        # What was taken away altogether is no setting any more.
        reasons += [step for name, step in lowered.items() if name not in shown]
        return replace(stepped, reasons=tuple(reasons), steps=steps)

    def _ledger(self, placement: Placement) -> MemoryLedger:
        return self._model(placement).ledger(placement, device_names=self._names)

    def _model(self, placement: Placement) -> MemoryModel:
        return self.model if placement.draft_tokens else self.alone

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.plan.machine.devices)


def _on_devices(ledger: MemoryLedger) -> int:
    return sum(device.total_bytes for device in ledger.devices)


def _value(placement: Placement, setting: str) -> str:
    return str(getattr(placement, setting))
