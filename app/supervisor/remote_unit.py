"""One model that a server elsewhere has: looked at now and then, never loaded, never in anybody's way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from app.backends import Circuit, RemoteBackend, RemoteRules
from app.config import ModelConfig, RemoteServer
from app.engine.process import State
from app.errors import GatewayError, ModelFailed, ModelLoading, SetupError
from app.offload import OffloadPlan
from app.supervisor.chronicle import Chronicle
from app.supervisor.planning import kind_of
from app.supervisor.signals import UnitRetired
from app.supervisor.status import Failure, ModelStatus

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
_SOON_SECONDS = 0.05


class RemoteUnit:
    """What ``Unit`` is for an engine of ours: requests enter by ``acquire`` and leave by ``release``.

    It holds no memory, so that it is never stopped for another model. ``_watch`` is the only writer of the state.
    """

    def __init__(
        self,
        model: ModelConfig,
        server: RemoteServer,
        *,
        environment: Mapping[str, str],
        chronicle: Chronicle,
        on_change: Callable[[RemoteUnit], None],
        rules: RemoteRules | None = None,
    ) -> None:
        self.model = model
        self.kind = kind_of(model, None)
        self.users = 0
        self.waiting = 0
        self.is_retired = False
        self._chronicle = chronicle
        self._on_change = on_change
        self._is_down = False
        self._loop = asyncio.get_running_loop()
        self._idle_since = self._loop.time()
        self._empty = asyncio.Event()
        self._empty.set()
        self._look_now = asyncio.Event()
        self.backend = RemoteBackend(
            server,
            model_id=model.id,
            slots=model.parallel,
            context_tokens=model.context,
            key=environment.get(server.key_env) if server.key_env is not None else None,
            on_change=self._changed,
            rules=rules,
        )
        self._watching = self._loop.create_task(self._watch(), name=f"remote {model.id}")

    @property
    def state(self) -> State:
        """READY once it has answered, FAILED while it is not asked."""
        if self.is_retired:
            return State.STOPPED
        if self.backend.circuit is Circuit.OPEN or (self.backend.limits is None and self.backend.problem is not None):
            return State.FAILED
        return State.STARTING if self.backend.limits is None else State.READY

    @property
    def is_ready(self) -> bool:
        """Whether a request may enter now."""
        return self.state is State.READY

    def status(self) -> ModelStatus:
        """What is known now."""
        backend = self.backend
        problem = backend.problem if self.state is State.FAILED else None
        retry_seconds = backend.retry_seconds
        return ModelStatus(
            model=self.model,
            facts=None,
            state=self.state,
            context_tokens=backend.limits.context_tokens if backend.limits is not None else self.model.context or 0,
            slots=backend.slots,
            pid=None,
            users=self.users,
            waiting=self.waiting,
            failure=None if problem is None else Failure(problem, problem, self._loop.time() + retry_seconds),
            next_try_seconds=retry_seconds if problem else None,
            idle_seconds=0.0 if self.users else self._loop.time() - self._idle_since,
            circuit=backend.circuit,
        )

    async def plan(self) -> OffloadPlan:
        """There is none; raises SetupError."""
        raise SetupError(f"The model {self.model.id!r} runs on another server; there is nothing to plan for it here.")

    def log_tail(self, count: int) -> list[str]:
        """What its engine writes stays there."""
        return []

    async def acquire(self, *, wait_seconds: float) -> RemoteBackend:
        """Enter; the first one waits until the server's limits are known, by which it may load the model.

        Raises ModelFailed while the server is not asked, ModelLoading after ``wait_seconds``, UnitRetired.
        """
        if self.is_retired:
            raise UnitRetired
        self._refuse_when_open()
        self.waiting += 1
        try:
            async with asyncio.timeout(wait_seconds):
                await self.backend.prepare()
        except TimeoutError:
            raise ModelLoading(
                f"The remote server of {self.model.id!r} still loads its model; try again.",
                retry_after_seconds=_RETRY_SECONDS,
            ) from None
        except SetupError as error:
            _log.error("model %s cannot be asked: %s", self.model.id, error)
            raise ModelFailed(
                f"The model {self.model.id!r} cannot be asked: its server is not set up for it. "
                "The gateway's log has the details.",
                retry_after_seconds=_RETRY_SECONDS,
            ) from None
        except GatewayError:
            self._refuse_when_open()
            raise
        finally:
            self.waiting -= 1
        self.users += 1
        self._empty.clear()
        return self.backend

    def release(self) -> None:
        """Leave."""
        self.users -= 1
        self._idle_since = self._loop.time()
        if self.users == 0:
            self._empty.set()

    def summon(self, *, by_operator: bool = False) -> None:
        """Look at the server now; an operator's word also forgives all failures."""
        if by_operator:
            self.backend.forgive()
        self._look_now.set()

    def adopt(self, model: ModelConfig) -> None:
        """Take over settings that need no other connection."""
        self.model = model

    async def replaced(self, backend: object, *, within_seconds: float) -> None:
        """A server elsewhere has no successor: it is asked again at once."""

    async def stop(self, *, drain: bool = True) -> None:
        """Nothing of it can be stopped from here."""

    async def retire(self, *, drain: bool) -> None:
        """Let those end who use it, then forget the server; who comes later gets UnitRetired."""
        self.is_retired = True
        if drain:
            await self._empty.wait()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.backend.close()

    def _refuse_when_open(self) -> None:
        if self.backend.circuit is Circuit.OPEN:
            raise ModelFailed(
                f"The model {self.model.id!r} cannot be asked: its server failed several times in a row.",
                retry_after_seconds=self.backend.retry_seconds,
            )

    async def _watch(self) -> None:
        while True:
            # Requests tell as much, and a busy server may be slow to answer anything else.
            if self.users == 0:
                await self.backend.look()
                self._changed()
            seconds = self.backend.rules.look
            if self.backend.circuit is not Circuit.CLOSED:
                seconds = min(seconds, self.backend.retry_seconds + _SOON_SECONDS)
            self._look_now.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    def _changed(self) -> None:
        state, problem = self.state, self.backend.problem
        if state is State.FAILED and not self._is_down:
            self._is_down = True
            self._chronicle.server_failed(self.model.id, problem or "it failed", self.backend.retry_seconds)
        elif state is State.READY and self._is_down and self.backend.circuit is Circuit.CLOSED:
            self._is_down = False
            self._chronicle.server_answers(self.model.id)
        self._on_change(self)
