"""Owns every backend: start on demand, watch, start again once, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from app.backends import LocalBackend
from app.config import MemoryConfig, ModelCatalog, ModelConfig
from app.engine.binary import EngineBinary
from app.engine.process import EngineDied, EngineExit, State
from app.engine.report import Cause
from app.errors import Draining, ModelFailed, ModelLoading
from app.gguf import ModelFacts, read_header
from app.hardware import probe_machine
from app.metrics import Metrics
from app.offload import OffloadPlan, Wish, plan_offload

_log = logging.getLogger(__name__)

# A client that has waited this long for a load is told to come back.
_LOAD_WAIT_SECONDS = 600.0
_BACK_OFF_SECONDS = 1.0
# A second death within this time is a failure, not bad luck.
_PROBATION_SECONDS = 60.0
# A model that failed is not tried again before this, however many ask.
_RETRY_SECONDS = 10.0
# Nor one whose engine cannot work at all (wrong CPU, missing library) before this.
_PERMANENT_RETRY_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What the gateway knows of a model now; ``context_tokens`` is the engine's own once it is loaded."""

    model: ModelConfig
    facts: ModelFacts
    state: State
    context_tokens: int
    slots: int
    pid: int | None


def wish_for(model: ModelConfig, memory: MemoryConfig, facts: ModelFacts) -> Wish:
    """What the configuration asks of the planner."""
    return Wish(
        context=requested_context(model, facts),
        parallel=model.parallel,
        kv_cache=model.kv_cache,
        gpu_layers=model.gpu_layers,
        cpu_moe_layers=model.cpu_moe_layers,
        vram_reserve_bytes=int(memory.vram_reserve),
        ram_reserve_bytes=int(memory.ram_reserve),
        require_gpu=model.require_gpu,
    )


def requested_context(model: ModelConfig, facts: ModelFacts) -> int:
    """Tokens per request: as configured, else the default as far as the model was trained for it."""
    if model.context is not None:
        return model.context
    return min(model.default_context, facts.context_trained or model.default_context)


class Supervisor:
    """One unit per model; loads happen one after the other, so that each plan sees what the one before it took."""

    def __init__(
        self,
        catalog: ModelCatalog,
        *,
        engine: EngineBinary,
        memory: MemoryConfig,
        run_dir: Path,
        metrics: Metrics,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._run_dir = run_dir
        self._environment = environment
        self._loading = asyncio.Lock()
        self._units = {
            model.id: _Unit(model, facts=read_header(model.path), load=self._load, metrics=metrics) for model in catalog
        }

    def __iter__(self) -> Iterator[ModelStatus]:
        return (unit.status() for unit in self._units.values())

    def status(self, model: ModelConfig) -> ModelStatus:
        """What is known of this model now."""
        return self._units[model.id].status()

    def backend(self, model: ModelConfig) -> LocalBackend | None:
        """The model's engine if it is ready."""
        return self._units[model.id].backend

    async def ready(self, model: ModelConfig) -> LocalBackend:
        """The model's engine, started if need be; raises ModelFailed or ModelLoading."""
        return await self._units[model.id].ready()

    async def close(self) -> None:
        """Stop every engine, side by side."""
        await asyncio.gather(*(unit.close() for unit in self._units.values()))

    async def _load(self, model: ModelConfig) -> LocalBackend:
        async with self._loading:
            plan = await asyncio.to_thread(self._plan, model)
            for line in plan.summary():
                _log.info("%s", line)
            backend = LocalBackend(
                plan,
                self._engine,
                model_id=model.id,
                run_dir=self._run_dir,
                environment=self._environment,
                extra_args=model.extra_args,
            )
            try:
                await backend.start()
            except BaseException:
                await backend.close()
                raise
            return backend

    def _plan(self, model: ModelConfig) -> OffloadPlan:
        facts = read_header(model.path)
        machine = probe_machine(self._engine.device_list())
        return plan_offload(facts, machine, wish_for(model, self._memory, facts))


class _Unit:
    """One model's life. ``_live`` is the only writer of ``backend``, ``state`` and ``_failure``."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        facts: ModelFacts,
        load: Callable[[ModelConfig], Awaitable[LocalBackend]],
        metrics: Metrics,
    ) -> None:
        self.backend: LocalBackend | None = None
        self._model = model
        self._facts = facts
        self._load = load
        self._metrics = metrics
        self._life: asyncio.Task[None] | None = None
        self._is_alive = False
        self._is_closing = False
        self._failure: ModelFailed | None = None
        self._retry_at = 0.0
        self._changed = asyncio.get_running_loop().create_future()
        self._become(State.STOPPED)

    def status(self) -> ModelStatus:
        """What is known now."""
        backend = self.backend
        return ModelStatus(
            model=self._model,
            facts=self._facts,
            state=self._state,
            context_tokens=backend.counter.context_tokens if backend else requested_context(self._model, self._facts),
            slots=backend.slots if backend else self._model.parallel,
            pid=backend.process.pid if backend else None,
        )

    async def ready(self) -> LocalBackend:
        """The engine, started if need be; one load however many ask."""
        if self.backend is not None and self.backend.is_ready:
            return self.backend
        try:
            async with asyncio.timeout(_LOAD_WAIT_SECONDS):
                while self.backend is None or not self.backend.is_ready:
                    self._ensure_alive()
                    await asyncio.shield(self._changed)
        except TimeoutError:
            raise ModelLoading(
                f"The model {self._model.id!r} is still loading; try again.", retry_after_seconds=30
            ) from None
        return self.backend

    async def close(self) -> None:
        """Stop the engine for good."""
        self._is_closing = True
        if self._life is None:
            return
        if self.backend is not None:
            await self.backend.close()
        else:
            self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    def _ensure_alive(self) -> None:
        if self._is_closing:
            raise Draining("The gateway is stopping.", retry_after_seconds=5)
        if self._is_alive:
            return
        if self._failure is not None and time.monotonic() < self._retry_at:
            raise self._failure
        self._is_alive = True
        self._life = asyncio.create_task(self._live(), name=f"model {self._model.id}")

    async def _live(self) -> None:
        """Load, serve, and after the first death start again once; a second one soon after it is a failure."""
        on_probation = False
        try:
            while True:
                self._become(State.STARTING)
                died = await self._serve(await self._load(self._model))
                if died.exit.cause is Cause.ASKED:
                    break
                if on_probation and died.after_seconds < _PROBATION_SECONDS:
                    raise EngineDied(died.exit)
                on_probation = True
                _log.warning("model %s: %s; starting it again", self._model.id, died.exit.sentence)
                self._metrics.engine_restarts.labels(self._model.id, died.exit.cause.value).inc()
                await asyncio.sleep(_BACK_OFF_SECONDS)
            self._end(State.STOPPED)
        except asyncio.CancelledError:
            self._end(State.STOPPED)
            raise
        except Exception as error:
            # Whatever it was, nobody may be left waiting for it, and it must not be tried again at once.
            self._fail(error)

    async def _serve(self, backend: LocalBackend) -> _Death:
        """Be READY until the engine ends."""
        started = time.monotonic()
        self.backend = backend
        self._become(State.READY)
        self._show_memory(backend)
        try:
            engine_exit = await backend.wait_exit()
            return _Death(engine_exit, time.monotonic() - started)
        finally:
            self.backend = None
            await backend.close()

    def _fail(self, error: Exception) -> None:
        engine_exit = error.exit if isinstance(error, EngineDied) else None
        reason = engine_exit.sentence if engine_exit else str(error) or repr(error)
        _log.error("model %s cannot be started: %s", self._model.id, reason)
        public = engine_exit.public if engine_exit else getattr(error, "public", "the engine does not start")
        public = public.rstrip(".")
        wait_seconds = _PERMANENT_RETRY_SECONDS if engine_exit and engine_exit.cause.permanent else _RETRY_SECONDS
        self._retry_at = time.monotonic() + wait_seconds
        self._failure = ModelFailed(
            f"The model {self._model.id!r} cannot be started: {public}. The gateway's log has the details.",
            retry_after_seconds=min(60, wait_seconds),
        )
        self._end(State.FAILED)

    def _end(self, state: State) -> None:
        self._is_alive = False
        self._become(state)

    def _become(self, state: State) -> None:
        """Change the state and wake everybody who waits for a change."""
        self._state = state
        for each in State:
            self._metrics.model_state.labels(self._model.id, each.value).set(each is state)
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        if not changed.done():
            changed.set_result(None)

    def _show_memory(self, backend: LocalBackend) -> None:
        for device, part, size_bytes in planned_parts(backend.plan):
            self._metrics.planned_memory.labels(self._model.id, device, part).set(size_bytes)
        for buffer in backend.measured.buffers:
            self._metrics.measured_memory.labels(self._model.id, buffer.device, buffer.kind).set(buffer.size_bytes)
        self._metrics.offloaded_layers.labels(self._model.id, "planned").set(backend.plan.placement.gpu_layers)
        actual = backend.measured.layers_offloaded if backend.plan.machine.devices else 0
        if actual is not None:
            self._metrics.offloaded_layers.labels(self._model.id, "actual").set(actual)


@dataclass(frozen=True, slots=True)
class _Death:
    exit: EngineExit
    after_seconds: float


def planned_parts(plan: OffloadPlan) -> Iterator[tuple[str, str, int]]:
    """(device, part, bytes) of everything that the plan gives memory to; RAM is the device ``host``."""
    ledgers = [(ledger.name, asdict(ledger)) for ledger in plan.memory.devices]
    for device, parts in [*ledgers, ("host", asdict(plan.memory.host))]:
        for part, size_bytes in parts.items():
            if part.endswith("_bytes") and size_bytes:
                yield device, part.removesuffix("_bytes"), size_bytes
