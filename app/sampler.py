"""Read the machine into gauges, now and then, so that a scrape only ever reads numbers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from app.auth import ApiKey
from app.engine.process import State
from app.engine.report import Cause
from app.footprint import Footprint, footprint
from app.hardware import DeviceMemory, device_memory, process_device_memory, ram_bytes
from app.metrics import Metrics
from app.quota import Quota
from app.scheduler import Scheduler
from app.slowdown import Look, SlowdownWatch
from app.supervisor import ModelStatus, Supervisor

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 5.0
_RESTARTED_AFTER = [cause for cause in Cause if cause is not Cause.ASKED and not cause.permanent]
_BUDGETS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class MachineSample:
    """RAM, devices, and the footprint of each model's engine, at one moment."""

    ram_total_bytes: int
    ram_available_bytes: int
    devices: tuple[DeviceMemory, ...] = ()
    engines: Mapping[str, Footprint] = field(default_factory=dict)


def read_machine(pids: Mapping[str, int]) -> MachineSample:
    """Read it now, ``pids`` being the engines by model; takes milliseconds, so call it from a thread."""
    total_bytes, available_bytes = ram_bytes()
    nvidia = process_device_memory()
    engines = {model: found for model, pid in pids.items() if (found := footprint(pid, nvidia=nvidia)) is not None}
    return MachineSample(total_bytes, available_bytes, device_memory(), engines)


class Sampler:
    """The only writer of the gauges of the machine, the engines' processes and the budgets."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        supervisor: Supervisor,
        scheduler: Scheduler,
        quota: Quota,
        keys: Callable[[], Iterable[ApiKey]],
        slowdowns: SlowdownWatch,
        interval_seconds: float = _INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._quota = quota
        self._keys = keys
        self._slowdowns = slowdowns
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._faults: dict[str, tuple[int, int]] = {}
        self._budgets: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Sample until cancelled; a sample that fails is reported and not the last."""
        while True:
            try:
                await self.sample()
            except Exception:
                _log.exception("the machine could not be sampled")
            await asyncio.sleep(self._interval_seconds)

    async def sample(self) -> None:
        """Take one sample."""
        statuses = list(self._supervisor)
        pids = {status.model.id: status.pid for status in statuses if status.pid is not None}
        sample = await asyncio.to_thread(read_machine, pids)
        self._show_machine(sample)
        for status in statuses:
            self._show_model(status, sample.engines.get(status.model.id), pids.get(status.model.id))
            self._look_for_slowdown(status, sample)
        self._slowdowns.forget_models_but({status.model.id for status in statuses})
        # A store that does not answer must not keep the machine from being looked at.
        with suppress(TimeoutError):
            async with asyncio.timeout(_BUDGETS_SECONDS):
                await self._show_budgets()

    def _show_machine(self, sample: MachineSample) -> None:
        ram, device_gauge = self._metrics.ram, self._metrics.device_memory
        ram.labels("total").set(sample.ram_total_bytes)
        ram.labels("used").set(sample.ram_total_bytes - sample.ram_available_bytes)
        ram.labels("available").set(sample.ram_available_bytes)
        for device in sample.devices:
            device_gauge.labels(device.name, "total").set(device.total_bytes)
            device_gauge.labels(device.name, "used").set(device.used_bytes)
            device_gauge.labels(device.name, "free").set(device.free_bytes)

    def _show_model(self, status: ModelStatus, engine: Footprint | None, pid: int | None) -> None:
        metrics, model = self._metrics, status.model.id
        metrics.of(model)
        for cause in _RESTARTED_AFTER:
            metrics.engine_restarts.labels(model, cause.value)
        self._scheduler.show(model)
        engine = engine or Footprint()
        metrics.engine_resident.labels(model).set(engine.resident_bytes)
        metrics.engine_shared_memory.labels(model).set(engine.shared_bytes)
        metrics.engine_device_memory.remove_by_labels({"model": model})
        for device, size_bytes in engine.device_bytes.items():
            metrics.engine_device_memory.labels(model, device).set(size_bytes)
        metrics.kv_tokens.labels(model, "promised").set(self._scheduler.held_tokens(model))
        capacity = status.context_tokens * status.slots if status.state is State.READY else 0
        metrics.kv_tokens.labels(model, "capacity").set(capacity)
        self._count_faults(model, pid, engine.major_faults)

    def _look_for_slowdown(self, status: ModelStatus, sample: MachineSample) -> None:
        model, engine = status.model.id, sample.engines.get(status.model.id)
        self._slowdowns.introduce(model)
        if status.state is not State.READY:
            self._slowdowns.rest(model)
        if status.state is not State.READY or engine is None or status.plan is None:
            # A server elsewhere has a speed, but no process here.
            return
        shares = [device.used_bytes / device.total_bytes for device in sample.devices if device.total_bytes]
        look = Look(self._clock(), max(shares, default=0.0), engine.shared_bytes, engine.major_faults)
        self._slowdowns.look(model, engine=status.pid, placement=status.plan.placement, look=look)

    def _count_faults(self, model: str, pid: int | None, faults: int) -> None:
        """The counter goes on where a new engine begins at nothing again."""
        counter = self._metrics.engine_major_faults.labels(model)
        if pid is None:
            return
        known_pid, known = self._faults.get(model, (pid, 0))
        counter.inc(max(0, faults - known) if known_pid == pid else faults)
        self._faults[model] = (pid, max(faults, known if known_pid == pid else 0))

    async def _show_budgets(self) -> None:
        """Limited windows only; what a reload took away is not shown any more."""
        metrics = self._metrics
        shown: set[tuple[str, str]] = set()
        for key in self._keys():
            if not key.limits.is_any:
                continue
            usage = await self._quota.usage(key.name, key.limits)
            for window, figures in usage.items():
                if figures["limit"] is not None:
                    shown.add((key.name, window))
                    metrics.budget_used.labels(key.name, window).set(figures["used"])
                    metrics.budget_limit.labels(key.name, window).set(figures["limit"])
        for name, window in self._budgets - shown:
            metrics.budget_used.remove(name, window)
            metrics.budget_limit.remove(name, window)
        self._budgets = shown
