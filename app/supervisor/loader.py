"""The order of loads: one after the other, each with a plan for what is free then, room made first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from app.backends import LocalBackend
from app.config import MemoryConfig, ModelConfig
from app.engine.landing import degradation
from app.engine.process import EngineDied, EngineExit, State
from app.engine.verify import PlanVerifier
from app.errors import DeviceMissing, DoesNotFit
from app.eviction import Evict, Go, Resident, SharingRules, Wait, as_good, choose
from app.hardware import Machine, largest_holders, process_device_memory
from app.metrics import Metrics
from app.offload import OffloadPlan, plan_offload
from app.offload.step_down import MOST_STEPS, Shortage, missing, replanned, step_down
from app.supervisor.chronicle import Chronicle
from app.supervisor.holdings import Holding, left_over
from app.supervisor.planning import ModelFiles, planned_parts, wish_for
from app.supervisor.signals import NoLongerWanted
from app.supervisor.unit import Unit

_log = logging.getLogger(__name__)

# Memory of a stopped engine comes back late on some drivers; after this the plan takes what there is.
_RETURN_SECONDS = 10.0
_RETURN_PAUSE_SECONDS = 0.5
_LOOK_PAUSE_SECONDS = 0.05

MakeBackend = Callable[[ModelConfig, OffloadPlan], LocalBackend]


class Loader:
    """Loads units one after the other. ``memory`` is replaced at a reload."""

    def __init__(
        self,
        units: Callable[[], Iterable[Unit]],
        *,
        memory: MemoryConfig,
        probe: Callable[[], Machine],
        make_backend: MakeBackend,
        metrics: Metrics,
        chronicle: Chronicle,
        verifier: PlanVerifier | None = None,
    ) -> None:
        self.memory = memory
        self._units = units
        self._probe = probe
        self._make_backend = make_backend
        self._metrics = metrics
        self._chronicle = chronicle
        self._verifier = verifier
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._looked: tuple[frozenset[str], float, Machine] | None = None
        self._bell: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        """Something changed that a waiting load may depend on."""
        bell, self._bell = self._bell, self._loop.create_future()
        if not bell.done():
            bell.set_result(None)

    async def load(self, unit: Unit) -> LocalBackend:
        """The unit's engine, ready.

        Raises EngineDied, SetupError (DoesNotFit …), UpstreamFailed, NoLongerWanted.
        """
        async with self._turn:
            self._looked = None
            plan = await self._confirmed(unit.model, await self._make_room(unit))
            return await self._load(unit, await self._below_what_died(unit, plan))

    async def preview(self, unit: Unit) -> OffloadPlan:
        """The plan by which the unit would be loaded now with nobody stopped; raises DoesNotFit."""
        return await asyncio.to_thread(self._plan, unit.model, await self._free_now(unit))

    async def fits_beside(self, unit: Unit) -> bool:
        """Whether the unit could be loaded now with nobody stopped."""
        try:
            await self.preview(unit)
        except DoesNotFit:
            return False
        return True

    async def _confirmed(self, model: ModelConfig, plan: OffloadPlan) -> OffloadPlan:
        """``plan`` with the engine's own word on it, or a corrected one; raises DoesNotFit when that forbids all."""
        if self._verifier is None:
            return plan
        return await asyncio.to_thread(self._verifier.confirm, plan, extra_args=model.extra_args)

    async def _load(self, unit: Unit, plan: OffloadPlan) -> LocalBackend:
        """The engine by ``plan``, or by the first smaller one that the memory really has room for."""
        while True:
            try:
                return await self._start(unit, plan)
            except EngineDied as died:
                smaller = await self._step_down(unit, plan, died.exit)
                if smaller is None:
                    died.is_final = bool(plan.steps) and died.exit.shortage is not None
                    raise
                plan = smaller

    async def _below_what_died(self, unit: Unit, plan: OffloadPlan) -> OffloadPlan:
        """``plan``, unless it is no smaller than one that is known not to do.

        After an engine that served and ran out of memory a step below that one's plan; after another death the plan
        that steps had led to.
        """
        died, lost = unit.died, unit.lost_plan
        if died is None or died.phase is not State.READY or lost is None or not as_good(plan, lost):
            return plan
        if (smaller := await self._step_down(unit, lost, died)) is not None:
            return smaller
        has_room = lost.memory.host.total_bytes <= plan.machine.ram_available_bytes - plan.wish.ram_reserve_bytes
        return lost if lost.steps and has_room else plan

    async def _step_down(self, unit: Unit, plan: OffloadPlan, ended: EngineExit) -> OffloadPlan | None:
        """What to try instead of ``plan``, whose engine ``ended`` so; None when memory was not it or nothing is left.

        Raises NoLongerWanted.
        """
        shortage = ended.shortage
        if shortage is None or len(plan.steps) >= MOST_STEPS:
            return None
        smaller = await self._around_others(unit, plan) if shortage is Shortage.DEVICE else None
        if smaller is None and self._verifier is not None:
            ask = self._verifier.step_down
            smaller = await asyncio.to_thread(ask, plan, shortage, extra_args=unit.model.extra_args)
        elif smaller is None:
            smaller = await asyncio.to_thread(step_down, plan, shortage)
        if smaller is not None:
            self._require_wanted(unit)
            self._chronicle.stepped_down(unit.model.id, smaller, ended)
        return smaller

    async def _around_others(self, unit: Unit, plan: OffloadPlan) -> OffloadPlan | None:
        """What fits beside programs that took memory of a device since ``plan`` was made; None where none did."""
        give_up_at = self._loop.time() + _RETURN_SECONDS
        while taken := missing(machine := await self._free_now(unit), plan.machine):
            if self._loop.time() >= give_up_at:
                break
            # Perhaps it is only not back yet from the engine that ended.
            await asyncio.sleep(_RETURN_PAUSE_SECONDS)
        if not taken:
            return None
        try:
            fresh = await self._confirmed(unit.model, await asyncio.to_thread(self._plan, unit.model, machine))
        except DoesNotFit:
            return None
        return replanned(plan, fresh, taken, holders=await asyncio.to_thread(self._others_on_devices))

    def _others_on_devices(self) -> str:
        ours = {status.pid for unit in self._units() if (status := unit.status()).pid is not None}
        return largest_holders(process_device_memory(), without=ours)

    async def _free_now(self, unit: Unit) -> Machine:
        return self._left_over(await asyncio.to_thread(self._probe), self._holdings(unit))

    async def _start(self, unit: Unit, plan: OffloadPlan) -> LocalBackend:
        unit.plan = plan
        for line in plan.summary():
            _log.info("%s", line)
        backend = unit.loading = self._make_backend(unit.model, plan)
        try:
            await backend.start()
            landed = degradation(plan, backend.measured)
            if landed is not None and not landed.on_device and unit.model.require_gpu:
                raise DeviceMissing(f"{unit.model.id} has require_gpu and is not served: {landed.reason}")
            if self._verifier is not None and landed is None:
                await asyncio.to_thread(self._verifier.learn, plan, backend.measured)
        except BaseException:
            await backend.close()
            unit.plan, unit.lost_plan = None, plan
            raise
        finally:
            unit.loading = None
        self._show_memory(unit.model, backend)
        self._metrics.degraded.labels(unit.model.id).set(landed is not None)
        if landed is not None:
            unit.plan = plan.as_degraded(landed.reason)
            self._chronicle.degraded(unit.model.id, landed.reason)
        return backend

    def _plan(self, model: ModelConfig, machine: Machine, files: ModelFiles | None = None) -> OffloadPlan:
        files = files or ModelFiles.read(model)
        wish = wish_for(model, self.memory, files.facts)
        return plan_offload(files.facts, machine, wish, mmproj=files.mmproj, draft=files.draft)

    async def _make_room(self, unit: Unit) -> OffloadPlan:
        """A plan that fits what is free now, after others were stopped if need be; raises DoesNotFit."""
        hoped, give_up_at = unit.lost_plan, self._loop.time() + _RETURN_SECONDS
        files = await asyncio.to_thread(ModelFiles.read, unit.model)
        while True:
            holders = self._holders(unit)
            try:
                decision = await self._decide(unit, files)
            except DoesNotFit as error:
                if self._holders(unit) != holders:
                    continue  # somebody left while we looked
                if not await self._comes_back(hoped is not None, give_up_at):
                    if self._holdings(unit) and not unit.may_evict:
                        raise NoLongerWanted from error
                    raise
                self._require_wanted(unit)
                continue
            if isinstance(decision, Go):
                if hoped is None or as_good(decision.plan, hoped) or self._loop.time() >= give_up_at:
                    self._require_wanted(unit)
                    return decision.plan
                await self._ring_or(_RETURN_PAUSE_SECONDS)
                continue
            self._require_wanted(unit)
            if isinstance(decision, Wait):
                # A busy model rings with each request that ends; one look per pause is enough.
                await asyncio.sleep(_LOOK_PAUSE_SECONDS)
                await self._ring_or(max(0.0, decision.seconds - _LOOK_PAUSE_SECONDS))
            elif await self._evict(unit, decision.model_ids):
                hoped, give_up_at = decision.hoped, self._loop.time() + _RETURN_SECONDS

    async def _decide(self, unit: Unit, files: ModelFiles) -> Go | Evict | Wait:
        holdings = self._holdings(unit)
        machine = await self._look(self._holders(unit))
        residents = self._residents(unit) if unit.may_evict else []
        waited_seconds = unit.waited_seconds() if unit.waiting else self.rules.max_wait
        plans: dict[frozenset[str], OffloadPlan | DoesNotFit] = {}

        def plan_without(gone: frozenset[str]) -> OffloadPlan:
            if gone not in plans:
                try:
                    plans[gone] = self._plan(unit.model, self._left_over(machine, holdings, gone), files)
                except DoesNotFit as error:
                    plans[gone] = error
            plan = plans[gone]
            if isinstance(plan, DoesNotFit):
                raise plan
            return plan

        return await asyncio.to_thread(choose, plan_without, residents, waited_seconds=waited_seconds, rules=self.rules)

    async def _look(self, holders: frozenset[str]) -> Machine:
        """The machine now; asked again only when others hold memory than at the last look, or after a while."""
        now = self._loop.time()
        if self._looked is None or self._looked[0] != holders or now - self._looked[1] >= _RETURN_PAUSE_SECONDS:
            self._looked = (holders, now, await asyncio.to_thread(self._probe))
        return self._looked[2]

    @property
    def rules(self) -> SharingRules:
        """How models take turns."""
        return SharingRules(
            min_residency=self.memory.min_residency,
            linger=min(1.0, self.memory.min_residency),
            max_wait=self.memory.max_swap_wait,
        )

    def _left_over(self, machine: Machine, holdings: Sequence[Holding], gone: frozenset[str] = frozenset()) -> Machine:
        limit = self.memory.ram_limit
        return left_over(
            machine,
            holdings,
            without=gone,
            ram_limit_bytes=None if limit is None else int(limit),
            ram_reserve_bytes=int(self.memory.ram_reserve),
        )

    async def _evict(self, unit: Unit, keys: frozenset[str]) -> bool:
        """Stop these units, those in use after a drain; False when nobody wants the room any more."""
        going = [each for each in self._units() if each.key in keys]
        names = ", ".join(each.model.id for each in going)
        _log.info("model %s: stopping %s to make room", unit.model.id, names)
        stops = [asyncio.create_task(each.stop()) for each in going]
        try:
            # Only those that still run: one that has ended would end each wait at once.
            while going_on := [stop for stop in stops if not stop.done()]:
                if not unit.is_wanted:
                    return False
                await asyncio.wait([*going_on, self._bell], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for stop in stops:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)
        for each in going:
            self._chronicle.evicted(each.model.id, made_room_for=unit.model.id)
        return True

    async def _comes_back(self, evicted: bool, give_up_at: float) -> bool:
        """Wait a little for memory that is on its way back; False when none is."""
        if any(unit.is_leaving and unit.loading is None for unit in self._units()):
            await self._ring_or(_RETURN_PAUSE_SECONDS)
            return True
        if evicted and self._loop.time() < give_up_at:
            await self._ring_or(_RETURN_PAUSE_SECONDS)
            return True
        return False

    async def _ring_or(self, seconds: float) -> None:
        await asyncio.wait([self._bell], timeout=seconds)

    def _require_wanted(self, unit: Unit) -> None:
        if not unit.is_wanted:
            raise NoLongerWanted

    def _holders(self, unit: Unit) -> frozenset[str]:
        return frozenset(other.key for other in self._units() if other is not unit and other.plan is not None)

    def _holdings(self, unit: Unit) -> list[Holding]:
        return [
            Holding.of(other.key, other.plan, counted_bytes=other.anonymous_bytes())
            for other in self._units()
            if other is not unit and other.plan is not None
        ]

    def _residents(self, unit: Unit) -> list[Resident]:
        return [other.resident() for other in self._units() if other is not unit and other.plan is not None]

    def _show_memory(self, model: ModelConfig, backend: LocalBackend) -> None:
        for device, part, size_bytes in planned_parts(backend.plan):
            self._metrics.planned_memory.labels(model.id, device, part).set(size_bytes)
        for buffer in backend.measured.buffers:
            self._metrics.measured_memory.labels(model.id, buffer.device, buffer.kind).set(buffer.size_bytes)
        self._metrics.offloaded_layers.labels(model.id, "planned").set(backend.plan.placement.gpu_layers)
        actual = backend.measured.layers_offloaded if backend.plan.machine.devices else 0
        if actual is not None:
            self._metrics.offloaded_layers.labels(model.id, "actual").set(actual)
