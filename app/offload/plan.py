"""The plan: settings, their memory, what to expect, and a reason for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.gguf import ModelFacts
from app.hardware import Machine
from app.memory import Correction, MemoryLedger, Placement
from app.offload.expected import Expected
from app.offload.verified import Verified
from app.offload.wish import Wish

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a setting has its value, in one sentence."""

    setting: str
    value: str
    because: str


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """How a model will be run on a machine; sizes in bytes.

    ``correction`` is what the formulas were corrected by; ``verified`` is the engine's own word on these flags, and
    ``finding`` says why there is none after it was asked. ``steps`` are what was lowered after engines that ran out of
    memory, oldest first. ``degraded`` says how the engine, once loaded, does not run as planned.
    """

    model: ModelFacts
    machine: Machine
    placement: Placement
    memory: MemoryLedger
    expected: Expected
    reasons: tuple[Reason, ...]
    wish: Wish
    mmproj: ModelFacts | None = None
    draft: ModelFacts | None = None
    correction: Correction = field(default_factory=Correction)
    verified: Verified | None = None
    finding: str | None = None
    steps: tuple[Reason, ...] = ()
    degraded: str | None = None

    def document(self, *, argv: Sequence[str] = ()) -> dict[str, Any]:
        """The plan as JSON; ``left_bytes`` is what remains after the reserve."""
        return {
            "model": self._model(),
            "machine": self._machine(),
            "placement": self._placement(),
            "memory": {"devices": self._devices(), "host": self._host()},
            "expected": asdict(self.expected),
            "reasons": [asdict(reason) for reason in self.reasons],
            "verified": self._verified(),
            "argv": list(argv),
        }

    def as_degraded(self, why: str) -> OffloadPlan:
        """The same plan, of an engine that does not run by it."""
        return replace(self, degraded=why, reasons=(*self.reasons, Reason("degraded", "yes", why)))

    def summary(self) -> tuple[str, str, str]:
        """Three lines for a person: the model, where it goes, what that takes."""
        return (self._model_line(), self._placement_line(), self._memory_line())

    def _model(self) -> dict[str, Any]:
        model = self.model
        return {
            "name": model.name,
            "path": str(model.path),
            "architecture": model.architecture,
            "file_bytes": model.file_bytes,
            "parameters": model.parameters,
            "layers": model.layers,
            "experts": model.experts,
            "context_trained": model.context_trained,
        }

    def _machine(self) -> dict[str, Any]:
        return {
            "devices": [
                {"name": device.name, "total_bytes": device.total_bytes, "free_bytes": device.free_bytes}
                for device in self.machine.devices
            ],
            "ram_total_bytes": self.machine.ram_total_bytes,
            "ram_available_bytes": self.machine.ram_available_bytes,
            "threads": self.machine.threads,
        }

    def _placement(self) -> dict[str, Any]:
        settings = asdict(self.placement)
        del settings["context_checkpoints"], settings["embedding"]
        if not self.placement.moe_cache_mib:
            del settings["moe_cache_mib"]
        if not self.placement.draft_tokens:
            del settings["draft_on"], settings["draft_head"], settings["draft_tokens"]
        return settings | {
            "tensor_split": list(self.placement.tensor_split),
            "kv_cache_k": self.placement.kv_cache_k.value,
            "kv_cache_v": self.placement.kv_cache_v.value,
        }

    def _devices(self) -> list[dict[str, Any]]:
        reserve = self.wish.vram_reserve_bytes
        return [
            asdict(ledger)
            | {
                "total_bytes": ledger.total_bytes,
                "reserve_bytes": reserve,
                "left_bytes": device.free_bytes - reserve - ledger.total_bytes,
            }
            for device, ledger in zip(self.machine.devices, self.memory.devices, strict=True)
        ]

    def _host(self) -> dict[str, Any]:
        host = self.memory.host
        left = self.machine.ram_available_bytes - self.wish.ram_reserve_bytes - host.total_bytes
        return asdict(host) | {"total_bytes": host.total_bytes, "left_bytes": left}

    def _verified(self) -> dict[str, Any] | None:
        if self.verified is None:
            return None
        placement = self.placement
        return self.verified.document(
            self.memory, mmproj_on_host=placement.mmproj_on == "host", draft_on_host=placement.draft_on == "host"
        )

    def _model_line(self) -> str:
        model = self.model
        parts = [model.architecture, f"{model.parameters / 1e9:.3g}B parameters"]
        if model.quantisation:
            parts.append(model.quantisation)
        parts += [f"{model.file_bytes / _GIB:.2f} GiB", f"{model.layers} layers"]
        if model.experts:
            parts.append(f"{model.experts} experts")
        return f"{model.name}: " + ", ".join(parts)

    def _placement_line(self) -> str:
        placement = self.placement
        where = f"on the CPU with {placement.threads} threads"
        if placement.gpu_layers:
            entries = self.model.layers + 1
            names = " + ".join(ledger.name for ledger in self.memory.devices if ledger.weights_bytes)
            where = f"{placement.gpu_layers} of {entries} layers on {names}"
            if placement.cpu_moe_layers:
                where += f", experts of {placement.cpu_moe_layers} layers in RAM"
        slots = "1 request" if placement.parallel == 1 else f"{placement.parallel} requests"
        return f"{where}; {placement.context_per_request} tokens for {slots}, cache {placement.kv_cache_k.value}"

    def _memory_line(self) -> str:
        parts = [
            f"{ledger.name} {mib(ledger.total_bytes)} of {mib(device.free_bytes)} free"
            for device, ledger in zip(self.machine.devices, self.memory.devices, strict=True)
        ]
        host = self.memory.host
        parts.append(
            f"RAM {mib(host.needed_bytes)} and up to {mib(host.total_bytes - host.needed_bytes)} of caches, "
            f"of {mib(self.machine.ram_available_bytes)} available"
        )
        return "; ".join(parts)


def mib(size_bytes: int) -> str:
    """A size for a sentence, such as ``6,905 MiB``."""
    return f"{size_bytes / _MIB:,.0f} MiB"
