"""Where a loaded model really is, against where it was planned."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.report import MeasuredMemory
from app.offload import OffloadPlan, mib

# Tensors that a device refuses are in the plan once the engine has confirmed it; this is far beyond.
_LEAST_SHARE = 0.5
_CURE = "Install a build for this device or repair its driver (`llama-gateway doctor`), then load the model again."


@dataclass(frozen=True, slots=True)
class Degradation:
    """How an engine runs worse than it should; ``on_device`` is whether any of the model is on a device."""

    reason: str
    on_device: bool


def degradation(plan: OffloadPlan, measured: MeasuredMemory) -> Degradation | None:
    """What a loaded engine says of its layers and tensors, against ``plan``; None when it is as planned.

    An engine that says nothing is believed. A plan for the CPU is no better than one that landed there, if the machine
    has a device that the engine does not list.
    """
    said = f" The engine said: {measured.complaint}." if measured.complaint else ""
    planned = plan.placement.gpu_layers
    if not planned:
        return _unseen(plan, said)
    landed = measured.layers_offloaded
    if landed is not None and landed < planned:
        reason = f"Only {landed} of {planned} planned layers are on a device"
        if not landed:
            reason = f"It runs on the CPU: none of the {planned} layers that were planned on a device is there"
        return Degradation(f"{reason}.{said} {_CURE}", on_device=landed > 0)
    weights = sum(device.weights_bytes + device.experts_bytes for device in plan.memory.devices)
    actual = measured.device_weights_bytes()
    if measured.buffers and actual < _LEAST_SHARE * weights:
        reason = f"Only {mib(actual)} of {mib(weights)} of weights that were planned on a device are there"
        return Degradation(f"{reason}.{said} {_CURE}", on_device=actual > 0)
    return None


def _unseen(plan: OffloadPlan, said: str) -> Degradation | None:
    unseen = plan.machine.unseen_devices
    if not unseen or plan.wish.gpu_layers == 0 or plan.machine.devices:
        return None
    names = ", ".join(unseen)
    reason = (
        f"It runs on the CPU although this machine has {names}: the engine lists no device, so it is built for CPUs"
    )
    return Degradation(f"{reason} only or lacks a driver.{said} {_CURE}", on_device=False)
