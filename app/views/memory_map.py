"""What lies where: the plans of all loaded models beside what their engines report, place by place. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from app.engine.report import BufferKind, MeasuredMemory
from app.hardware import Device, DeviceMemory, with_driver_memory
from app.offload import OffloadPlan
from app.supervisor import planned_parts

RAM = "RAM"
_HOST = "host"
_MAPPED = "Mapped"
_NO_LIMIT = 1 << 62

PARTS = {
    "weights": "Weights",
    "experts": "Experts",
    "kv_cache": "K and V cache",
    "state": "Recurrent state",
    "compute": "Compute buffers",
    "output": "Output buffers",
    "mmproj": "Projector",
    "draft": "Draft model",
    "prompt_cache": "Prompt cache, at most",
    "checkpoints": "Checkpoints, at most",
}
# The engine's words for what it has allocated; experts are among its model buffers.
_MEASURED = {
    BufferKind.MODEL: "weights",
    BufferKind.KV: "kv_cache",
    BufferKind.RS: "state",
    BufferKind.COMPUTE: "compute",
    BufferKind.OUTPUT: "output",
}


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model: its plan, what its engine reports (None: nothing yet), and its process's size in RAM."""

    model_id: str
    plan: OffloadPlan
    measured: MeasuredMemory | None
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Portion:
    """One part of one model in one place."""

    model: str
    part: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """A device or RAM; ``others_bytes`` is what everything but our engines holds, ``reserve_bytes`` is kept free."""

    name: str
    about: str
    total_bytes: int
    others_bytes: int
    reserve_bytes: int
    planned: tuple[Portion, ...] = ()
    measured: tuple[Portion, ...] = ()

    @property
    def planned_bytes(self) -> int:
        """By plan, all models together."""
        return sum(portion.size_bytes for portion in self.planned)

    @property
    def measured_bytes(self) -> int:
        """As the engines report, all models together."""
        return sum(portion.size_bytes for portion in self.measured)

    @property
    def left_bytes(self) -> int:
        """What the plans and everybody else leave above the reserve; negative when it is promised twice."""
        return self.total_bytes - self.others_bytes - self.planned_bytes - self.reserve_bytes


def memory_map(
    residents: Sequence[Resident],
    *,
    ram_total_bytes: int,
    ram_available_bytes: int,
    ram_reserve_bytes: int,
    vram_reserve_bytes: int,
    drivers: Sequence[DeviceMemory],
) -> tuple[Place, ...]:
    """Every device that a plan or a driver knows, then RAM."""
    devices = list(_devices(residents, drivers, vram_reserve_bytes))
    return (*devices, _ram(residents, ram_total_bytes, ram_available_bytes, ram_reserve_bytes))


def _devices(residents: Sequence[Resident], drivers: Sequence[DeviceMemory], reserve_bytes: int) -> Iterator[Place]:
    known: dict[str, Device] = {}
    for resident in residents:
        for device in resident.plan.machine.devices:
            known.setdefault(device.name, device)
    unmatched = list(drivers)
    for device in known.values():
        planned = tuple(_planned(residents, device.name))
        measured = tuple(_measured(residents, device.name))
        driver = _driver_of(device, unmatched)
        if driver is None:
            others = device.total_bytes - device.free_bytes
        else:
            unmatched.remove(driver)
            others = max(0, driver.used_bytes - sum(portion.size_bytes for portion in measured or planned))
        yield Place(device.name, device.description, device.total_bytes, others, reserve_bytes, planned, measured)
    for driver in unmatched:
        yield Place(driver.name, "", driver.total_bytes, driver.used_bytes, reserve_bytes)


def _driver_of(device: Device, drivers: Iterable[DeviceMemory]) -> DeviceMemory | None:
    """What the driver calls this device."""
    unlimited = replace(device, free_bytes=_NO_LIMIT)
    return next((one for one in drivers if with_driver_memory([unlimited], [one])[0] is not unlimited), None)


def _ram(residents: Sequence[Resident], total_bytes: int, available_bytes: int, reserve_bytes: int) -> Place:
    """A mapped file is no memory in use, since the kernel may drop it; what of the rest is not ours is the others'."""
    ours = sum(min(_taken_bytes(one), one.resident_bytes) for one in residents)
    others = max(0, total_bytes - available_bytes - ours)
    planned, measured = tuple(_planned(residents, _HOST)), tuple(_measured(residents, _HOST))
    return Place(RAM, "", total_bytes, others, reserve_bytes, planned, measured)


def _taken_bytes(resident: Resident) -> int:
    buffers = resident.measured.buffers if resident.measured is not None else ()
    return sum(buffer.size_bytes for buffer in buffers if buffer.on_host and not buffer.device.endswith(_MAPPED))


def _planned(residents: Iterable[Resident], place: str) -> Iterator[Portion]:
    for resident in residents:
        for device, part, size_bytes in planned_parts(resident.plan):
            if device == place:
                yield Portion(resident.model_id, part, size_bytes)


def _measured(residents: Iterable[Resident], place: str) -> Iterator[Portion]:
    for resident in residents:
        sums: dict[str, int] = {}
        for buffer in resident.measured.buffers if resident.measured is not None else ():
            if (place == _HOST) if buffer.on_host else (buffer.device == place):
                part = _MEASURED[buffer.kind]
                sums[part] = sums.get(part, 0) + buffer.size_bytes
        yield from (Portion(resident.model_id, part, sums[part]) for part in PARTS if sums.get(part))
