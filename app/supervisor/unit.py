"""One model's life: loaded when wanted, watched, started again within reason, unloaded when idle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from app.backends import LocalBackend
from app.config import ModelConfig
from app.engine.process import EngineDied, EngineExit, State
from app.engine.report import Cause
from app.errors import ModelFailed, ModelLoading, UpstreamFailed, UpstreamTimeout
from app.eviction import Resident
from app.gguf import ModelFacts
from app.offload import OffloadPlan
from app.supervisor.chronicle import Chronicle
from app.supervisor.planning import kind_of, requested_context
from app.supervisor.restarts import GiveUp, RestartPolicy
from app.supervisor.signals import GaveUp, NoLongerWanted, UnitRetired, unless
from app.supervisor.status import Failure, ModelStatus

_log = logging.getLogger(__name__)

# What a load is taken to need before one has been seen: reading the file at this rate.
_GUESSED_BYTES_PER_SECOND = 200e6
_LEAST_RETRY_SECONDS = 2.0
_NO_TIME_SECONDS = 0.001


class Unit:
    """One model's engine, whoever wants it.

    ``_live`` is the only writer of ``backend`` and of the state; ``plan`` is written by the loader, from before the
    engine is started, and cleared here when it is gone. Requests enter by ``acquire`` and leave by ``release``.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        key: str,
        facts: ModelFacts,
        load: Callable[[Unit], Awaitable[LocalBackend]],
        chronicle: Chronicle,
        policy: RestartPolicy,
        on_change: Callable[[Unit], None],
    ) -> None:
        self.model = model
        # Names this unit among those of all configurations, where the model's name may come twice.
        self.key = key
        self.facts, self.kind = facts, kind_of(model, facts)
        self.backend: LocalBackend | None = None
        self.plan: OffloadPlan | None = None
        # By what the engine that just died had run: as much should be free again soon.
        self.lost_plan: OffloadPlan | None = None
        self.died: EngineExit | None = None
        self.loading: LocalBackend | None = None
        self.users = 0
        self.waiting = 0
        self.waiting_since: float | None = None
        # Somebody wants it loaded although no request waits; an operator's wish may stop other models.
        self.is_summoned = False
        self.is_ordered = False
        self.is_retired = False
        self._loop = asyncio.get_running_loop()
        self._load = load
        self._chronicle = chronicle
        self._policy = policy
        self._on_change = on_change
        self._closed_doors = 0
        # The engine died although nobody asked it to: it comes back whether or not somebody waits.
        self._is_restart = False
        self._life: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._failure: Failure | None = None
        self._last_used = self._resident_since = self._started_at = self._loop.time()
        self._load_seconds: float | None = None
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._become(State.STOPPED)

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether a request may enter now."""
        return self._closed_doors == 0 and self.backend is not None and self.backend.is_ready

    @property
    def is_alive(self) -> bool:
        """Whether it is loading, serving, stopping, or about to be started again."""
        return self._life is not None

    @property
    def is_leaving(self) -> bool:
        """Whether the memory it holds comes back without anybody asking for it."""
        return self.plan is not None and (self.backend is None or self._closed_doors > 0)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody would miss it."""
        return self.waiting > 0 or self.is_summoned or self._is_restart or self.model.pin

    @property
    def may_evict(self) -> bool:
        """Whether who wants it is important enough to stop other models."""
        return self.waiting > 0 or self.is_ordered

    def waited_seconds(self) -> float:
        """How long the one who has waited longest has waited."""
        return 0.0 if self.waiting_since is None else self._loop.time() - self.waiting_since

    def status(self) -> ModelStatus:
        """What is known now."""
        backend, now = self.backend, self._loop.time()
        failure = self._failure if self._state is State.FAILED else None
        serving = backend or self.loading
        return ModelStatus(
            model=self.model,
            facts=self.facts,
            state=self._state,
            context_tokens=backend.counter.context_tokens if backend else requested_context(self.model, self.facts),
            slots=backend.slots if backend else self.model.parallel,
            pid=serving.process.pid if serving is not None else None,
            users=self.users,
            waiting=self.waiting,
            deaths=self._policy.deaths,
            failure=failure,
            next_try_seconds=max(0.0, failure.retry_at - now) if failure else None,
            idle_seconds=self._idle_seconds() if backend else None,
            resident_seconds=now - self._resident_since if backend else None,
            load_seconds=self._load_seconds,
            plan=self.plan,
            argv=serving.process.spec.argv if serving is not None else (),
        )

    def resident(self) -> Resident:
        """What the choice of whom to stop needs to know."""
        now = self._loop.time()
        return Resident(
            self.key,
            users=self.users,
            pinned=self.model.pin or self.is_leaving,
            idle_seconds=self._idle_seconds(),
            resident_seconds=now - self._resident_since,
            reload_seconds=self._expected_load_seconds(),
        )

    def log_tail(self, count: int) -> list[str]:
        """The engine's last lines, of a failed start too."""
        backend = self.backend or self.loading
        if backend is not None:
            return backend.process.log_tail(count)
        lines = self._failure.log_tail if self._failure is not None else ()
        return list(lines[-count:])

    def anonymous_bytes(self) -> int:
        """RAM that the system counts as taken by its engine."""
        backend = self.backend or self.loading
        return backend.process.anonymous_bytes() if backend is not None else 0

    # --- who uses it --------------------------------------------------------------------------------------------------

    async def acquire(self, *, wait_seconds: float) -> LocalBackend:
        """Enter, with the engine started if need be: one load however many ask.

        Raises ModelFailed, ModelLoading after ``wait_seconds``, UnitRetired.
        """
        if not self.is_ready:
            await self._wait_until_ready(wait_seconds)
        assert self.backend is not None
        self.users += 1
        return self.backend

    def release(self) -> None:
        """Leave."""
        self.users -= 1
        self._last_used = self._loop.time()
        if self.users == 0:
            self._wake()

    def summon(self, *, by_operator: bool = False) -> None:
        """Load it although no request waits; an operator's word also ends a back-off and forgives all failures."""
        if by_operator:
            self._failure = None
            self._policy.forgive()
            self.is_ordered = True
        if self.backend is None:
            self.is_summoned = True
            # Somebody who does not wait is not told of a failure that is still fresh.
            with suppress(ModelFailed):
                self._ensure_alive()
            self.is_summoned = self.is_alive
            self._wake()

    def adopt(self, model: ModelConfig) -> None:
        """Take over settings that need no other engine."""
        self.model = model
        self._wake()

    async def next_change(self) -> None:
        """Until anything about it changes."""
        await asyncio.shield(self._changed)

    async def replaced(self, backend: object, *, within_seconds: float) -> None:
        """Until ``backend`` is no longer the model's engine, for a moment: a broken connection is noticed first."""
        try:
            async with asyncio.timeout(within_seconds):
                while self.backend is backend:
                    await asyncio.shield(self._changed)
        except TimeoutError:
            return

    async def stop(self, *, drain: bool = True) -> None:
        """Let those end who use it, then end the engine; who comes meanwhile waits for the next load.

        Cancelled while it drains it opens the door again.
        """
        self._closed_doors += 1
        try:
            while drain and self.users > 0:
                await asyncio.shield(self._changed)
            if self._life is not None:
                self._stop.set()
                await asyncio.wait({self._life})
        finally:
            self._closed_doors -= 1
            self._wake()

    async def retire(self, *, drain: bool) -> None:
        """Stop for good; who waits or comes later gets UnitRetired."""
        self.is_retired = True
        self._wake()
        await self.stop(drain=drain)

    async def _wait_until_ready(self, wait_seconds: float) -> None:
        self.waiting += 1
        if self.waiting_since is None:
            self.waiting_since = self._loop.time()
        try:
            async with asyncio.timeout(wait_seconds):
                while not self.is_ready:
                    if self.is_retired:
                        raise UnitRetired
                    self._ensure_alive()
                    await asyncio.shield(self._changed)
        except TimeoutError:
            raise ModelLoading(
                f"The model {self.model.id!r} is still loading; try again.",
                retry_after_seconds=self._remaining_seconds(),
            ) from None
        finally:
            self.waiting -= 1
            if self.waiting == 0:
                self.waiting_since = None
                self._wake()

    def _ensure_alive(self) -> None:
        """Begin a life, unless there is one, the door is closed, or the last failure is too fresh."""
        if self.is_alive or self._closed_doors > 0 or self.is_retired:
            return
        if self._failure is not None and (left := self._failure.retry_at - self._loop.time()) > 0:
            raise ModelFailed(
                f"The model {self.model.id!r} cannot be started: {self._failure.public}. "
                "The gateway's log has the details.",
                retry_after_seconds=min(300.0, left),
            )
        self._stop = asyncio.Event()
        self._life = asyncio.create_task(self._live(), name=f"model {self.model.id}")

    # --- its life: nothing below is called from anywhere else ---------------------------------------------------------

    async def _live(self) -> None:
        """Load, serve, and again after a death, until it is stopped, idle or given up."""
        end = State.STOPPED
        try:
            while (delay_seconds := await self._once()) is not None:
                self._is_restart = True
                self._become(State.STARTING)
                if not await self._pause(delay_seconds):
                    break
        except NoLongerWanted:
            _log.info("model %s: nobody waits for it any more", self.model.id)
        except Exception as error:
            # Whatever it was, nobody may be left waiting for it, and it must not be tried again at once.
            self._fail(error)
            end = State.FAILED
        finally:
            self._life = self.lost_plan = self.died = None
            self.is_summoned = self.is_ordered = self._is_restart = False
            self._become(end)

    async def _once(self) -> float | None:
        """One engine from load to end; after how many seconds to start another, None for never."""
        self._become(State.STARTING)
        self._started_at = self._loop.time()
        try:
            backend = await unless(self._stop, self._load(self))
        except EngineDied as died:
            return None if died.exit.cause is Cause.ASKED else self._judge(died.exit, is_final=died.is_final)
        except (UpstreamFailed, UpstreamTimeout) as error:
            # It became ready and then did not answer.
            return self._judge(EngineExit(None, Cause.CRASH, State.STARTING, (str(error),)))
        if backend is None:
            return None
        engine_exit = await self._serve(backend)
        return None if engine_exit is None or engine_exit.cause is Cause.ASKED else self._judge(engine_exit)

    async def _serve(self, backend: LocalBackend) -> EngineExit | None:
        """Be READY until the engine ends (how is returned), is to stop, or is idle for too long."""
        now = self._loop.time()
        self._load_seconds = now - self._started_at
        self._last_used = self._resident_since = now
        self._failure = None
        self._policy.became_ready(now)
        self.backend, self.is_summoned, self.is_ordered = backend, False, False
        self._become(State.READY)
        self._chronicle.loaded(self.model.id, self._load_seconds)
        exit_task = self._loop.create_task(backend.wait_exit())
        ends: list[asyncio.Future[Any]] = [exit_task, self._loop.create_task(self._stop.wait())]
        try:
            while not any(end.done() for end in ends) and self._idle_left() != 0:
                await asyncio.wait([*ends, self._changed], timeout=self._idle_left(), return_when="FIRST_COMPLETED")
            if not any(end.done() for end in ends):
                self._chronicle.idle(self.model.id, self.model.idle_unload_seconds)
        finally:
            # From here on nobody enters; in the same step in which that was decided.
            self.backend = None
            self._become(State.STOPPING)
            for end in ends:
                end.cancel()
            await backend.close()
            await asyncio.gather(*ends, return_exceptions=True)
            self.plan, self.lost_plan = None, self.plan
        return exit_task.result() if not exit_task.cancelled() else None

    def _idle_seconds(self) -> float:
        return 0.0 if self.users else self._loop.time() - self._last_used

    def _idle_left(self) -> float | None:
        """Seconds until it has been idle for too long; 0 when it has, None when that never comes."""
        limit = self.model.idle_unload_seconds
        if limit is None or self.model.pin or self.users or self.waiting:
            return None
        left = self._last_used + limit - self._loop.time()
        # A timer may fire a little early; what is left then is no time at all.
        return left if left > _NO_TIME_SECONDS else 0.0

    async def _pause(self, seconds: float) -> bool:
        """Back off; False when it was stopped meanwhile, at once True when an operator orders it."""
        ends = self._loop.time() + seconds
        stop: asyncio.Future[Any] = self._loop.create_task(self._stop.wait())
        try:
            while not stop.done() and not self.is_ordered and (left := ends - self._loop.time()) > _NO_TIME_SECONDS:
                await asyncio.wait([stop, self._changed], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            return not stop.done()
        finally:
            stop.cancel()
            await asyncio.gather(stop, return_exceptions=True)

    def _judge(self, engine_exit: EngineExit, *, is_final: bool = False) -> float:
        """The seconds to back off before the next start; raises GaveUp."""
        self.loading, self.plan, self.died = None, None, engine_exit
        verdict = self._policy.ended(self._loop.time(), permanent=is_final or engine_exit.cause.permanent)
        if isinstance(verdict, GiveUp):
            raise GaveUp(engine_exit, verdict.retry_seconds)
        self._chronicle.restarting(self.model.id, engine_exit, verdict.delay_seconds)
        return verdict.delay_seconds

    def _fail(self, error: Exception) -> None:
        now = self._loop.time()
        self._failure = Failure.of(error, now=now)
        self._chronicle.failed(self.model.id, self._failure, self._failure.retry_at - now)

    def _expected_load_seconds(self) -> float:
        return self._load_seconds or self.facts.file_bytes / _GUESSED_BYTES_PER_SECOND

    def _remaining_seconds(self) -> float:
        """An honest Retry-After: what is left of a load as long as the last one."""
        spent = self._loop.time() - self._started_at if self.loading is not None else 0.0
        return min(300.0, max(_LEAST_RETRY_SECONDS, self._expected_load_seconds() - spent))

    def _become(self, state: State) -> None:
        """Change the state and tell everybody who waits for a change."""
        self._state = state
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, self._loop.create_future()
        if not changed.done():
            changed.set_result(None)
        self._on_change(self)
