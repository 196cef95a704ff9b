"""What would fit instead of what does not: less context, fewer requests, another cache, fewer layers, fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from app.errors import DoesNotFit
from app.gguf import TENSOR_TYPES, ModelFacts, TensorInfo
from app.hardware import Machine
from app.memory.placement import CELL_PADDING
from app.offload.plan import OffloadPlan
from app.offload.planner import plan_offload
from app.offload.wish import Wish

_GIB = 1 << 30
_LEAST_CONTEXT = 1024
_COMPACT_CACHES = ("q8_0", "q4_0")
# Bits per weight of whole files as llama-quantize writes them, embeddings and output included, most precise first.
_MIXTURES: Mapping[str, float] = {
    "Q8_0": 8.5,
    "Q6_K": 6.6,
    "Q5_K_M": 5.7,
    "Q4_K_M": 4.9,
    "Q4_K_S": 4.6,
    "IQ4_XS": 4.3,
    "Q3_K_M": 3.9,
    "Q3_K_S": 3.5,
    "IQ3_XXS": 3.1,
    "Q2_K": 2.9,
    "IQ2_XXS": 2.2,
}


@dataclass(frozen=True, slots=True)
class Alternative:
    """One change that makes it fit: the setting, its value, and what comes of it in a few words."""

    setting: str
    value: str
    gives: str


def alternatives(
    facts: ModelFacts,
    machine: Machine,
    wish: Wish,
    *,
    mmproj: ModelFacts | None = None,
    draft: ModelFacts | None = None,
) -> tuple[Alternative, ...]:
    """Each single change of a refused ``wish`` that fits; empty when none does. Pure; takes up to a few seconds."""
    search = _Search(facts, machine, wish, mmproj, draft)
    found: list[Alternative | None] = [search.context(), search.parallel()]
    found += [search.cache(kind) for kind in _COMPACT_CACHES]
    found += [search.layers(), search.automatic(), search.mixture(), search.ram()]
    return tuple(alternative for alternative in found if alternative is not None)


@dataclass(frozen=True, slots=True)
class _Search:
    facts: ModelFacts
    machine: Machine
    wish: Wish
    mmproj: ModelFacts | None
    draft: ModelFacts | None

    def fits(
        self, wish: Wish, *, facts: ModelFacts | None = None, machine: Machine | None = None
    ) -> OffloadPlan | None:
        try:
            return plan_offload(
                facts or self.facts, machine or self.machine, wish, mmproj=self.mmproj, draft=self.draft
            )
        except DoesNotFit:
            return None

    def context(self) -> Alternative | None:
        """The largest context that fits, everything else as wished."""
        trained, wished = self.facts.context_trained, self.wish.context
        most = min(wished or trained or 0, trained or wished or 0)
        steps = _largest(
            most // CELL_PADDING, lambda step: self.fits(replace(self.wish, context=step * CELL_PADDING)) is not None
        )
        tokens = steps * CELL_PADDING
        plan = self.fits(replace(self.wish, context=tokens)) if tokens >= _LEAST_CONTEXT else None
        return Alternative("context", str(tokens), _where(plan)) if plan is not None else None

    def parallel(self) -> Alternative | None:
        """As many requests at once as fit."""
        count = _largest(
            self.wish.parallel - 1, lambda slots: self.fits(replace(self.wish, parallel=slots)) is not None
        )
        plan = self.fits(replace(self.wish, parallel=count)) if count else None
        return Alternative("parallel", str(count), _where(plan)) if plan is not None else None

    def cache(self, kind: str) -> Alternative | None:
        """A cache of fewer bits, where one was asked for by name or layers were."""
        if self.wish.kv_cache == kind:
            return None
        plan = self.fits(replace(self.wish, kv_cache=kind))
        return Alternative("kv_cache", kind, _where(plan)) if plan is not None else None

    def layers(self) -> Alternative | None:
        """As many layers as fit where a number was asked for, or the fewest experts in RAM."""
        if self.wish.gpu_layers is not None:
            count = _largest(
                self.wish.gpu_layers - 1, lambda layers: self.fits(replace(self.wish, gpu_layers=layers)) is not None
            )
            plan = self.fits(replace(self.wish, gpu_layers=count)) if count else None
            return Alternative("gpu_layers", str(count), _where(plan)) if plan is not None else None
        if self.wish.cpu_moe_layers is not None:
            for count in range(self.wish.cpu_moe_layers + 1, self.facts.layers + 1):
                plan = self.fits(replace(self.wish, cpu_moe_layers=count))
                if plan is not None:
                    return Alternative("cpu_moe_layers", str(count), _where(plan))
        return None

    def automatic(self) -> Alternative | None:
        """The planner's own choice instead of numbers that were asked for."""
        if self.wish.gpu_layers is None and self.wish.cpu_moe_layers is None and not self.wish.require_gpu:
            return None
        plan = self.fits(replace(self.wish, gpu_layers=None, cpu_moe_layers=None, require_gpu=False))
        return Alternative("offload", "auto", _where(plan)) if plan is not None else None

    def mixture(self) -> Alternative | None:
        """The most precise quantisation of this model that fits, as a file size."""
        elements = self.facts.parameters
        bits = 8 * sum(tensor.size_bytes for tensor in self.facts.tensors) / elements if elements else 0.0
        for name, target in _MIXTURES.items():
            if target >= bits:
                continue
            smaller = requantised(self.facts, target / bits)
            plan = self.fits(self.wish, facts=smaller)
            if plan is not None:
                return Alternative(
                    "model", f"{name}, about {smaller.file_bytes / _GIB:.1f} GiB", f"at most {_where(plan)}"
                )
        return None

    def ram(self) -> Alternative | None:
        """How much free RAM it would take."""
        have = self.machine.ram_available_bytes

        def with_ram(gib: int) -> OffloadPlan | None:
            return self.fits(self.wish, machine=replace(self.machine, ram_available_bytes=gib * _GIB))

        least, most = ceil(have / _GIB), 4 * ceil((have + self.facts.file_bytes) / _GIB) + 64
        if with_ram(most) is None:
            return None
        short = _largest(most - least, lambda less: with_ram(most - less) is not None)
        return Alternative("free RAM", f"{most - short} GiB", _where(with_ram(most - short)))


def requantised(facts: ModelFacts, scale: float) -> ModelFacts:
    """``facts`` of a file with ``scale`` times the bits; vectors and other F32 tensors stay as they are."""
    tensors = tuple(_scaled(tensor, scale) for tensor in facts.tensors)
    saved = sum(tensor.size_bytes for tensor in facts.tensors) - sum(tensor.size_bytes for tensor in tensors)
    return replace(facts, tensors=tensors, file_bytes=facts.file_bytes - saved)


def _scaled(tensor: TensorInfo, scale: float) -> TensorInfo:
    if TENSOR_TYPES[tensor.type].name == "F32":
        return tensor
    return replace(tensor, size_bytes=int(tensor.size_bytes * scale))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` that fits, 0 when none does; less always fits better."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _where(plan: OffloadPlan | None) -> str:
    return "".join(_places(plan)) if plan is not None else ""


def _places(plan: OffloadPlan) -> Iterator[str]:
    placement = plan.placement
    if not placement.gpu_layers:
        yield "everything in RAM"
        return
    yield f"{placement.gpu_layers} of {plan.model.layers + 1} layers on the device"
    if len(plan.machine.devices) > 1:
        yield "s"
    if placement.cpu_moe_layers:
        yield f", experts of {placement.cpu_moe_layers} in RAM"
