"""The result: bytes per device and in RAM, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """Bytes on one device."""

    name: str
    weights_bytes: int = 0
    experts_bytes: int = 0
    kv_cache_bytes: int = 0
    state_bytes: int = 0
    compute_bytes: int = 0
    mmproj_bytes: int = 0
    draft_bytes: int = 0
    moe_cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything on this device."""
        return (
            self.weights_bytes
            + self.experts_bytes
            + self.kv_cache_bytes
            + self.state_bytes
            + self.compute_bytes
            + self.mmproj_bytes
            + self.draft_bytes
            + self.moe_cache_bytes
        )


@dataclass(frozen=True, slots=True)
class HostLedger:
    """Bytes in RAM; the prompt cache grows up to its limit, checkpoints up to their count."""

    weights_bytes: int = 0
    experts_bytes: int = 0
    kv_cache_bytes: int = 0
    state_bytes: int = 0
    compute_bytes: int = 0
    prompt_cache_bytes: int = 0
    checkpoints_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything in RAM, caches at their limits."""
        return self.needed_bytes + self.prompt_cache_bytes + self.checkpoints_bytes

    @property
    def needed_bytes(self) -> int:
        """What the model cannot run without: everything but prompt cache and checkpoints."""
        return self.weights_bytes + self.experts_bytes + self.kv_cache_bytes + self.state_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes of one running model, devices in the engine's order."""

    devices: tuple[DeviceLedger, ...]
    host: HostLedger
