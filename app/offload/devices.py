"""How much of a model goes to the devices: everything, else fewer experts, else fewer layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from app.hardware import Device
from app.memory import MemoryLedger, MemoryModel, Placement

_FILL_STEPS = 8


@dataclass(frozen=True, slots=True)
class DeviceSearch:
    """Tries placements of one model on fixed budgets, one per device, in bytes."""

    model: MemoryModel
    names: tuple[str, ...]
    budgets: tuple[int, ...]

    @classmethod
    def over(cls, model: MemoryModel, devices: Sequence[Device], *, reserve_bytes: int) -> DeviceSearch:
        """A search over what is free on ``devices`` beyond the reserve."""
        return cls(
            model,
            tuple(device.name for device in devices),
            tuple(max(0, device.free_bytes - reserve_bytes) for device in devices),
        )

    def ledger(self, placement: Placement) -> MemoryLedger:
        """The bytes of ``placement`` on these devices."""
        return self.model.ledger(placement, device_names=self.names)

    def fits(self, placement: Placement) -> bool:
        """Whether every device stays within its budget."""
        devices = self.ledger(placement).devices
        return all(device.total_bytes <= budget for device, budget in zip(devices, self.budgets, strict=True))

    def best(self, base: Placement) -> Placement:
        """The placement that keeps most on the devices; nothing on them when not even one layer fits."""
        for candidate in self._candidates(base):
            placed = self.place(candidate)
            if placed is not None:
                return placed
        return replace(base, gpu_layers=0, cpu_moe_layers=0, tensor_split=())

    def place(self, placement: Placement) -> Placement | None:
        """``placement`` with its layers shared among the devices so that it fits, or None."""
        for split in self._splits(placement):
            candidate = replace(placement, tensor_split=split)
            if self.fits(candidate):
                return candidate
        return None

    def _candidates(self, base: Placement) -> Iterator[Placement]:
        """From best to least: all, experts of ever more layers in RAM, then ever fewer layers on the devices."""
        if not self.names:
            return
        everything, blocks = self.model.all_layers, self.model.shape.blocks
        yield replace(base, gpu_layers=everything, cpu_moe_layers=0)
        in_ram = 0
        if self.model.has_experts:
            in_ram = blocks
            if self._worth_trying(replace(base, gpu_layers=everything, cpu_moe_layers=in_ram)):
                for layers in range(1, blocks + 1):
                    yield replace(base, gpu_layers=everything, cpu_moe_layers=layers)
        for layers in range(everything - 1, 0, -1):
            yield replace(base, gpu_layers=layers, cpu_moe_layers=in_ram)

    def _worth_trying(self, placement: Placement) -> bool:
        return self.place(placement) is not None

    def _splits(self, placement: Placement) -> Iterator[tuple[float, ...]]:
        """Layers per device, evenly by room first, then fuller and fuller from the first device on."""
        if len(self.names) == 1:
            yield ()
            return
        entries = range(self.model.all_layers - placement.gpu_layers, self.model.all_layers)
        costs = [self.model.layer_bytes(placement, layer) for layer in entries]
        rooms = self._rooms(placement)
        least = min(1.0, sum(costs) / max(1, sum(rooms)))
        for step in range(_FILL_STEPS + 1):
            fill = least + (1.0 - least) * step / _FILL_STEPS
            split = _fill(costs, [room * fill for room in rooms])
            if split is not None:
                yield split

    def _rooms(self, placement: Placement) -> list[int]:
        """Bytes for layers on each device: its budget less compute buffer and projector."""
        probe = self.ledger(replace(placement, tensor_split=(1.0,) * len(self.names)))
        compute = max(device.compute_bytes for device in probe.devices)
        return [
            max(0, budget - compute - device.mmproj_bytes)
            for budget, device in zip(self.budgets, probe.devices, strict=True)
        ]


def _fill(costs: Sequence[int], rooms: Sequence[float]) -> tuple[float, ...] | None:
    """Consecutive layers per device so that none holds more than its room, or None."""
    split, layer = [], 0
    for room in rooms:
        start, left = layer, room
        while layer < len(costs) and costs[layer] <= left:
            left -= costs[layer]
            layer += 1
        split.append(float(layer - start))
    return tuple(split) if layer == len(costs) else None
