"""Owns every engine: started on demand, watched, started again, made room for, stopped."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from app.backends import Backend, LocalBackend, RemoteRules
from app.backends.conversations import Conversations, folder_of, forget_others
from app.backends.liveness import Patience
from app.config import MemoryConfig, ModelCatalog, ModelConfig
from app.engine.binary import EngineBinary
from app.engine.environment import child_environment
from app.engine.process import State
from app.engine.verify import PlanVerifier
from app.errors import Draining, EngineUnusable, ModelNotFound
from app.events import EventLog
from app.gguf import Kind, ModelFacts
from app.hardware import Machine, probe_machine
from app.metrics import Metrics
from app.offload import OffloadPlan
from app.supervisor.changes import Changes, compare
from app.supervisor.chronicle import Chronicle
from app.supervisor.loader import Loader, MakeBackend
from app.supervisor.planning import ModelFiles
from app.supervisor.remote_unit import RemoteUnit
from app.supervisor.restarts import RestartPolicy
from app.supervisor.signals import UnitRetired
from app.supervisor.status import ModelStatus
from app.supervisor.unit import Unit

_log = logging.getLogger(__name__)

_LOAD_WAIT_SECONDS = 300.0
# A broken connection is noticed before the death that broke it.
_DEATH_NOTICED_SECONDS = 1.0


AnyUnit = Unit | RemoteUnit


class Supervisor:
    """One unit per model, and the order in which they are loaded."""

    def __init__(
        self,
        catalog: ModelCatalog,
        *,
        engine: EngineBinary,
        memory: MemoryConfig,
        run_dir: Path,
        metrics: Metrics,
        events: EventLog | None = None,
        environment: Mapping[str, str] = os.environ,
        patience: Patience | None = None,
        load_wait_seconds: float = _LOAD_WAIT_SECONDS,
        records: Path | None = None,
        instance: str = "",
        learned: Path | None = None,
        probe: Callable[[], Machine] | None = None,
        make_backend: MakeBackend | None = None,
        new_policy: Callable[[], RestartPolicy] = RestartPolicy,
        remote_rules: RemoteRules | None = None,
        conversations: Path | None = None,
    ) -> None:
        self._engine, self._run_dir = engine, run_dir
        self._metrics = metrics
        self._chronicle = Chronicle(metrics, events or EventLog())
        self._environment, self._engine_environment = environment, child_environment(environment)
        self._hide_keys(catalog)
        self._patience = patience
        self._load_wait_seconds = load_wait_seconds
        self._records, self._instance = records, instance
        self._new_policy = new_policy
        self._remote_rules, self._conversations = remote_rules, conversations
        self._numbers = itertools.count(1)
        self._is_closing = False
        self._default: str | None = catalog.default_model
        # Units that wait to replace the one of their model, and units that were replaced and still answer.
        self._successors: dict[str, Unit] = {}
        self._retired: set[AnyUnit] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._units: dict[str, AnyUnit] = {}
        self._shown: dict[str, State] = {}
        self._loader = Loader(
            self._all_units,
            memory=memory,
            probe=probe or self._probe,
            make_backend=make_backend or self._local_backend,
            metrics=metrics,
            chronicle=self._chronicle,
            verifier=self._verifier(learned) if make_backend is None else None,  # a scripted engine cannot be asked
        )
        self._add_all(catalog)

    # --- what is known ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ModelStatus]:
        return (unit.status() for unit in self._units.values())

    def status(self, model: ModelConfig) -> ModelStatus:
        """What is known of this model now."""
        return self._unit(model).status()

    def kind(self, model: ModelConfig) -> Kind:
        """What the model is for."""
        return self._unit(model).kind

    def backend(self, model: ModelConfig) -> Backend | None:
        """The model's engine if it is ready."""
        return self._unit(model).backend

    async def plan(self, model: ModelConfig) -> OffloadPlan:
        """The plan that its engine runs by, or the one by which it would be loaded now.

        Raises DoesNotFit, or SetupError for a model that another server has.
        """
        unit = self._unit(model)
        if isinstance(unit, RemoteUnit):
            return await unit.plan()
        return unit.plan or await self._loader.preview(unit)

    def log_tail(self, model: ModelConfig, count: int) -> list[str]:
        """The last lines that the model's engine wrote."""
        return self._unit(model).log_tail(count)

    # --- who uses it --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, model: ModelConfig) -> AsyncIterator[Backend]:
        """The model's engine, started if need be, and not stopped for another model before the block has ended.

        Raises ModelFailed, ModelLoading, Draining; ModelNotFound when a reload has removed it.
        """
        while True:
            unit = self._unit(model)
            try:
                backend: Backend = await unit.acquire(wait_seconds=self._load_wait_seconds)
                break
            except UnitRetired:
                self._refuse_when_closing()
        try:
            yield backend
        finally:
            unit.release()

    async def ready(self, model: ModelConfig) -> Backend:
        """The model's engine, started if need be; it may be stopped at any time, unlike that of ``use``."""
        async with self.use(model) as backend:
            return backend

    async def replaced(self, model: ModelConfig, backend: object) -> None:
        """Give the death of ``backend`` a moment to be noticed, so that the next ``use`` gets its successor."""
        await self._unit(model).replaced(backend, within_seconds=_DEATH_NOTICED_SECONDS)

    # --- what an operator asks for ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load what is configured to be there from the start; nothing is stopped for it."""
        for unit in list(self._units.values()):
            if unit.model.preload or unit.model.id == self._default:
                unit.summon()

    def load(self, model: ModelConfig) -> None:
        """Load it, whatever its past failures; models that nobody uses make room."""
        self._refuse_when_closing()
        self._unit(model).summon(by_operator=True)

    def unload(self, model: ModelConfig) -> None:
        """Stop it once its requests have ended; the next request loads it again."""
        unit = self._unit(model)
        if isinstance(unit, Unit) and unit.is_alive:
            self._chronicle.unloading(model.id)
        self._do(unit.stop())

    async def apply(self, catalog: ModelCatalog, memory: MemoryConfig) -> Changes:
        """Go over to another configuration and touch only what differs; raises SetupError before anything changes.

        Models that need another engine get it beside the old one where both fit, else after its answers have ended.
        """
        known = {name: self._successors.get(name, unit).model for name, unit in self._units.items()}
        if not self._engine_serves(catalog):
            raise EngineUnusable("The gateway was started for models on other servers alone; restart it to run others.")
        self._hide_keys(catalog)
        changes = compare(known, catalog)
        models = {model.id: model for model in catalog}
        facts = {
            name: await asyncio.to_thread(_read_facts, models[name]) for name in (*changes.added, *changes.restarted)
        }
        self._loader.memory = memory
        self._default = catalog.default_model
        for name in changes.removed:
            self._drop_successor(name)
            self._retire(self._units.pop(name))
            self._shown.pop(name, None)
            self._chronicle.forgotten(name)
        for name in changes.adjusted:
            # A unit that is being replaced keeps its settings: a crash must not bring it back with its successor's.
            self._successors.get(name, self._units[name]).adopt(models[name])
        for name in changes.added:
            self._add(models[name], facts[name])
        for name in changes.restarted:
            self._replace(models[name], facts[name])
        self.start()
        return changes

    async def close(self) -> None:
        """Stop every engine, side by side."""
        self._is_closing = True
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        units = [*self._units.values(), *self._successors.values(), *self._retired]
        await asyncio.gather(*(unit.retire(drain=False) for unit in units))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _unit(self, model: ModelConfig) -> AnyUnit:
        self._refuse_when_closing()
        try:
            return self._units[model.id]
        except KeyError:
            raise ModelNotFound(f"The model {model.id!r} does not exist any more.", param="model") from None

    def _refuse_when_closing(self) -> None:
        if self._is_closing:
            raise Draining("The gateway is stopping.", retry_after_seconds=5)

    def _all_units(self) -> list[Unit]:
        """Those with engines of ours."""
        units = (*self._units.values(), *self._successors.values(), *self._retired)
        return [unit for unit in units if isinstance(unit, Unit)]

    def _probe(self) -> Machine:
        return probe_machine(self._engine.device_list())

    def _engine_serves(self, catalog: ModelCatalog) -> bool:
        return bool(self._engine.command) or all(model.remote is not None for model in catalog)

    def _add_all(self, catalog: ModelCatalog) -> None:
        if self._conversations is not None:
            forget_others(self._conversations, [each.id for each in catalog if each.keep_conversations_bytes])
        for model in catalog:
            self._add(model, _read_facts(model))

    def _add(self, model: ModelConfig, facts: ModelFacts | None) -> None:
        self._units[model.id] = self._new_unit(model, facts)
        self._show(self._units[model.id])

    def _new_unit(self, model: ModelConfig, facts: ModelFacts | None) -> AnyUnit:
        if facts is None:
            assert model.remote is not None
            return RemoteUnit(
                model,
                model.remote,
                environment=self._environment,
                chronicle=self._chronicle,
                on_change=self._show,
                rules=self._remote_rules,
            )
        return Unit(
            model,
            key=f"{model.id}#{next(self._numbers)}",
            facts=facts,
            load=self._loader.load,
            chronicle=self._chronicle,
            policy=self._new_policy(),
            on_change=self._on_change,
        )

    def _verifier(self, learned: Path | None) -> PlanVerifier:
        return PlanVerifier(self._engine, environment=self._engine_environment, learned_path=learned)

    def _local_backend(self, model: ModelConfig, plan: OffloadPlan) -> LocalBackend:
        return LocalBackend(
            plan,
            self._engine,
            model_id=model.id,
            run_dir=self._run_dir,
            environment=self._engine_environment,
            extra_args=model.extra_args,
            patience=self._patience,
            records=self._records,
            instance=self._instance,
            conversations=self._conversations_of(model, plan),
        )

    def _conversations_of(self, model: ModelConfig, plan: OffloadPlan) -> Conversations | None:
        if self._conversations is None or model.keep_conversations_bytes is None:
            return None
        folder, limit_bytes = folder_of(self._conversations, model.id), model.keep_conversations_bytes
        return Conversations(folder, plan, self._engine, extra_args=model.extra_args, limit_bytes=limit_bytes)

    def _hide_keys(self, catalog: ModelCatalog) -> None:
        """The keys of servers elsewhere are nothing to an engine."""
        for model in catalog:
            if model.remote is not None and model.remote.key_env is not None:
                self._engine_environment.pop(model.remote.key_env, None)

    def _show(self, unit: AnyUnit) -> None:
        """The state of the unit that counts for its model, not of one that was replaced or waits to replace it."""
        name = unit.model.id
        if self._units.get(name) is unit and self._shown.get(name) is not unit.state:
            self._shown[name] = unit.state
            for each in State:
                self._metrics.model_state.labels(name, each.value).set(each is unit.state)
            if unit.state in {State.STOPPED, State.FAILED}:
                self._metrics.forget_memory(name)

    def _on_change(self, unit: Unit) -> None:
        self._loader.ring()
        self._show(unit)
        if unit.state is State.STOPPED and not unit.is_alive:
            self._bring_default_back(unit)

    def _bring_default_back(self, stopped: Unit) -> None:
        """The default model comes back when the last of the others has gone."""
        default = self._units.get(self._default or "")
        if default is None or default is stopped or self._is_closing:
            return
        if not any(unit.is_alive for unit in self._all_units()):
            default.summon()

    def _replace(self, model: ModelConfig, facts: ModelFacts | None) -> None:
        """Give the model another engine."""
        self._drop_successor(model.id)
        old = self._units[model.id]
        new = self._new_unit(model, facts)
        if isinstance(old, Unit) and isinstance(new, Unit) and old.is_alive:
            self._successors[model.id] = new
            self._do(self._succeed(old, new))
        else:
            self._switch(old, new)

    async def _succeed(self, old: Unit, new: Unit) -> None:
        """Load the new one beside the old if both fit; else, or if that fails, the old one ends first."""
        was_serving = old.backend is not None
        if was_serving and await self._loader.fits_beside(new):
            new.summon()
            while new.is_alive and not new.is_ready:
                await new.next_change()
        if self._successors.get(new.model.id) is not new:
            return  # another reload came in between
        self._switch(old, new)
        if was_serving and not new.is_alive:
            new.summon()

    def _switch(self, old: AnyUnit, new: AnyUnit) -> None:
        self._successors.pop(new.model.id, None)
        self._units[new.model.id] = new
        self._show(new)
        self._retire(old)

    def _drop_successor(self, name: str) -> None:
        if name in self._successors:
            self._retire(self._successors.pop(name))

    def _retire(self, unit: AnyUnit) -> None:
        unit.is_retired = True
        self._retired.add(unit)
        self._do(self._end(unit))

    async def _end(self, unit: AnyUnit) -> None:
        await unit.retire(drain=True)
        self._retired.discard(unit)

    def _do(self, work: Coroutine[None, None, None]) -> None:
        """A task that belongs to the supervisor: awaited when it closes."""
        chore = asyncio.create_task(work)
        self._chores.add(chore)
        chore.add_done_callback(self._done)

    def _done(self, chore: asyncio.Task[None]) -> None:
        self._chores.discard(chore)
        if not chore.cancelled() and (error := chore.exception()) is not None:
            _log.error("unexpected %r in the supervisor", error)


def _read_facts(model: ModelConfig) -> ModelFacts | None:
    """What the model's files say; None for one that another server has. Raises ModelFileError."""
    return None if model.remote is not None else ModelFiles.read(model).facts
