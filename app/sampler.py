"""Read the machine into gauges, now and then, so that a scrape only ever reads numbers."""

from __future__ import annotations

import asyncio

import psutil

from app.hardware import device_memory, ram_bytes
from app.metrics import Metrics
from app.supervisor import Supervisor

_INTERVAL_SECONDS = 5.0


async def sample_forever(metrics: Metrics, supervisor: Supervisor) -> None:
    """Sample until cancelled."""
    while True:
        await asyncio.to_thread(_sample, metrics, {status.model.id: status.pid for status in supervisor})
        await asyncio.sleep(_INTERVAL_SECONDS)


def _sample(metrics: Metrics, pids: dict[str, int | None]) -> None:
    total_bytes, available_bytes = ram_bytes()
    metrics.ram.labels("total").set(total_bytes)
    metrics.ram.labels("used").set(total_bytes - available_bytes)
    metrics.ram.labels("available").set(available_bytes)
    for device in device_memory():
        metrics.device_memory.labels(device.name, "total").set(device.total_bytes)
        metrics.device_memory.labels(device.name, "used").set(device.used_bytes)
        metrics.device_memory.labels(device.name, "free").set(device.free_bytes)
    for model_id, pid in pids.items():
        metrics.engine_resident.labels(model_id).set(_resident_bytes(pid))


def _resident_bytes(pid: int | None) -> int:
    if pid is None:
        return 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
