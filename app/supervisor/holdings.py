"""What live engines hold by their plans, so that the next plan only gets what is left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from app.hardware import Machine
from app.offload import OffloadPlan
from app.offload.host import PROCESS_BYTES


@dataclass(frozen=True, slots=True)
class Holding:
    """One live engine: bytes by its plan, and what of its RAM the system already counts as taken.

    Mapped weights never count as taken, since the kernel could drop them: it would read them again for each token.
    """

    model_id: str
    host_bytes: int
    device_bytes: Mapping[str, int]
    counted_bytes: int = 0

    @classmethod
    def of(cls, model_id: str, plan: OffloadPlan, *, counted_bytes: int) -> Holding:
        """The holding of an engine that runs by ``plan``."""
        devices = {ledger.name: ledger.total_bytes for ledger in plan.memory.devices if ledger.total_bytes}
        return cls(model_id, PROCESS_BYTES + plan.memory.host.total_bytes, devices, counted_bytes)


def left_over(
    machine: Machine,
    holdings: Sequence[Holding],
    *,
    without: Collection[str] = (),
    ram_limit_bytes: int | None = None,
    ram_reserve_bytes: int = 0,
) -> Machine:
    """``machine`` as a planner should see it: less what is promised to ``holdings``, plus what ``without`` would free.

    ``ram_limit_bytes`` is what all engines together may use, without the reserve.
    """
    kept = [holding for holding in holdings if holding.model_id not in without]
    gone = [holding for holding in holdings if holding.model_id in without]
    ram = machine.ram_available_bytes
    ram -= sum(max(0, holding.host_bytes - holding.counted_bytes) for holding in kept)
    ram += sum(holding.counted_bytes for holding in gone)
    if ram_limit_bytes is not None:
        ram = min(ram, ram_limit_bytes + ram_reserve_bytes - sum(holding.host_bytes for holding in kept))
    devices = tuple(
        replace(
            device,
            free_bytes=max(
                0,
                min(
                    device.free_bytes + _on(device.name, gone),
                    device.total_bytes - _on(device.name, kept),
                ),
            ),
        )
        for device in machine.devices
    )
    return replace(machine, devices=devices, ram_available_bytes=max(0, ram))


def _on(device: str, holdings: Sequence[Holding]) -> int:
    return sum(holding.device_bytes.get(device, 0) for holding in holdings)
