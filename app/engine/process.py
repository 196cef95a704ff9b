"""The life of one engine: started, watched until it is ready, watched until it ends, reaped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.engine.child import Child
from app.engine.endpoint import Endpoint
from app.engine.health import HealthProbe
from app.engine.oom import kills_between, oom_kills
from app.engine.output import EngineOutput
from app.engine.records import write_record
from app.engine.releases import Releases
from app.engine.report import Cause, EngineExit, MeasuredMemory, MemoryReport, cause_of_death
from app.engine.state import TRANSITIONS, State

__all__ = ["EngineDied", "EngineExit", "EngineProcess", "LaunchSpec", "State"]

_log = logging.getLogger(__name__)

_FIRST_PROBE_SECONDS = 0.02
_SLOWEST_PROBE_SECONDS = 0.25
_EXIT_LINES = 60
# A load that computes without a word (compiling kernels for a new device) is given so much more time.
_BUSY_FACTOR = 8
_BUSY_SHARE = 0.05
# An engine that hangs does not listen; no use in asking it for long.
_HANG_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """How to start one engine.

    ``stall_seconds`` is how long a load may show no progress: in its log, resident size and bytes read.
    ``records`` is the folder where its process is noted.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    endpoint: Endpoint
    api_key: str = field(repr=False)
    grace_seconds: float = 5
    stall_seconds: float = 75
    records: Path | None = None


class EngineDied(Exception):
    """The engine ended before it was ready; ``exit`` says why, ``is_final`` that all that might help was tried."""

    def __init__(self, exit: EngineExit, *, is_final: bool = False) -> None:
        super().__init__(exit.sentence)
        self.exit = exit
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class _Life:
    """The messages of one life: stop it; it hangs; the start is over, well or not; this is how it ended."""

    stop_asked: asyncio.Event
    hang_seen: asyncio.Event
    start_over: asyncio.Event
    ended: asyncio.Future[EngineExit]
    tasks: list[asyncio.Task[None]]


class EngineProcess:
    """One engine, which may be started again after it has ended.

    ``start`` and ``stop`` decide and move in one synchronous step. One task owns the child from spawn to reap and is
    the only writer of everything below; cancelling who waits does not touch it.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self._state = State.STOPPED
        self._child: Child | None = None
        self._exit: EngineExit | None = None
        self._output = EngineOutput()
        self._report = MemoryReport()
        self.releases = Releases()
        self._life: _Life | None = None
        self._record: Path | None = None

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self._state

    @property
    def pid(self) -> int | None:
        """The live process, None when there is none."""
        return None if self._child is None else self._child.pid

    @property
    def exit(self) -> EngineExit | None:
        """How the last life ended; None before that and while one lasts."""
        return self._exit

    @property
    def measured(self) -> MeasuredMemory:
        """What the engine has said of its memory in this life."""
        return self._report.measured()

    def resident_bytes(self) -> int:
        """Resident size of the process, 0 when there is none."""
        return 0 if self._child is None else self._child.resident_bytes()

    def anonymous_bytes(self) -> int:
        """What of it the kernel cannot drop: resident size less mapped files; 0 when there is no process."""
        return 0 if self._child is None else self._child.anonymous_bytes()

    def log_tail(self, count: int = 100) -> list[str]:
        """Its last log lines, oldest first; at most 400 are kept."""
        return self._output.tail(count)

    def start(self) -> None:
        """Begin a life; only from STOPPED or FAILED, within a running loop."""
        self._move(State.STARTING)
        loop = asyncio.get_running_loop()
        self._exit, self._output, self._report = None, EngineOutput(), MemoryReport()
        life = self._life = _Life(asyncio.Event(), asyncio.Event(), asyncio.Event(), loop.create_future(), [])
        life.tasks.append(loop.create_task(self._own(life), name=f"engine {self.spec.name}"))

    async def wait_ready(self) -> None:
        """Until it answers; raises EngineDied when it ends first or is being stopped."""
        life = self._current_life()
        await life.start_over.wait()
        if self._life is not life or self._state is not State.READY:
            raise EngineDied(await asyncio.shield(life.ended))

    async def wait_exit(self) -> EngineExit:
        """Until this life has ended and everything of it is reaped."""
        return await asyncio.shield(self._current_life().ended)

    async def stop(self) -> EngineExit:
        """Ask it to end and wait until it is reaped; again and again if you like."""
        if self._life is None:
            return EngineExit(None, Cause.ASKED, State.STOPPED)
        self._life.stop_asked.set()
        if self._state in {State.STARTING, State.READY}:
            self._move(State.STOPPING)
        return await self.wait_exit()

    def declare_hung(self) -> None:
        """End it although it runs: whoever watched it saw no progress."""
        if self._life is not None:
            self._life.hang_seen.set()

    def _current_life(self) -> _Life:
        assert self._life is not None, "start() comes first"
        return self._life

    def _move(self, to: State) -> None:
        assert to in TRANSITIONS[self._state], f"{self._state} -> {to}"
        _log.debug("engine %s: %s -> %s", self.spec.name, self._state, to)
        self._state = to

    # --- the owner: nothing below is called from anywhere else --------------------------------------------------------

    async def _own(self, life: _Life) -> None:
        kills_before = oom_kills()
        cause: Cause | None = Cause.ASKED  # what stays when the loop is torn down around us
        returncode: int | None = None
        try:
            cause = await self._live(life)
            returncode = await self._reap(_HANG_GRACE_SECONDS if cause is Cause.HANG else self.spec.grace_seconds)
            if returncode is None and cause is Cause.ASKED:
                cause = Cause.HANG  # it would not go, and its memory has not come back
        finally:
            if self._child is not None:
                returncode, self._child = self._child.kill_now(), None
            lines = self._output.tail(_EXIT_LINES)
            phase = State.READY if life.start_over.is_set() else State.STARTING
            if cause is None:
                kills = kills_between(kills_before, oom_kills())
                cause = cause_of_death(returncode=returncode, phase=phase, lines=lines, oom_kills=kills)
            self._finish(life, EngineExit(returncode, cause, phase, tuple(lines)))

    async def _live(self, life: _Life) -> Cause | None:
        """Spawn and watch until something ends this life: a stop, a hang, or (None) the process itself."""
        self._unlink_socket()
        try:
            self._child = await Child.spawn(self.spec.argv, self.spec.environment, self._on_output)
        except OSError as error:
            self._on_output(f"launcher: cannot execute {self.spec.argv[0]}: {error.strerror}\n".encode())
            return None
        self._note(self._child)
        loop = asyncio.get_running_loop()
        loading = loop.create_task(self._watch_start(self._child))
        waits = (self._child.wait(), life.stop_asked.wait(), life.hang_seen.wait())
        ends = {loop.create_task(wait) for wait in waits}
        try:
            await asyncio.wait({loading, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if not any(end.done() for end in ends):
                if not loading.result():
                    return Cause.HANG
                self._become_ready(life)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if life.stop_asked.is_set():
                return Cause.ASKED
            return Cause.HANG if life.hang_seen.is_set() else None
        finally:
            for task in (loading, *ends):
                task.cancel()
            await asyncio.gather(loading, *ends, return_exceptions=True)

    async def _watch_start(self, child: Child) -> bool:
        """True once ``/health`` says 200, False after ``stall_seconds`` without any progress."""
        loop = asyncio.get_running_loop()
        progress, progress_at, pause = (0, 0, 0), loop.time(), _FIRST_PROBE_SECONDS
        cpu_seconds = 0.0
        async with HealthProbe(self.spec.endpoint) as probe:
            while not await probe.ready():
                now = loop.time()
                seen = (self._output.bytes_seen, child.resident_bytes(), child.bytes_read())
                if seen != progress:
                    progress, progress_at, cpu_seconds = seen, now, child.cpu_seconds()
                elif (still := now - progress_at) > self.spec.stall_seconds:
                    computes = child.cpu_seconds() - cpu_seconds > _BUSY_SHARE * still
                    if not computes or still > _BUSY_FACTOR * self.spec.stall_seconds:
                        return False
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _SLOWEST_PROBE_SECONDS)
        return True

    def _become_ready(self, life: _Life) -> None:
        if not life.stop_asked.is_set():
            self._move(State.READY)
            life.start_over.set()

    async def _reap(self, grace_seconds: float) -> int | None:
        if self._state is not State.STOPPING:
            self._move(State.STOPPING)
        if self._child is None:
            return None
        returncode = await self._child.reap(grace_seconds=grace_seconds)
        self._child = None
        self._report.feed(self._output.close())
        return returncode

    def _finish(self, life: _Life, exit: EngineExit) -> None:
        self._unlink_socket()
        if self._record is not None:
            self._record.unlink(missing_ok=True)
        self._exit = exit
        if self._state is not State.STOPPING:
            self._move(State.STOPPING)
        self._move(State.STOPPED if exit.cause is Cause.ASKED else State.FAILED)
        life.start_over.set()
        if not life.ended.done():
            life.ended.set_result(exit)

    def _note(self, child: Child) -> None:
        if self.spec.records is not None:
            self._record = write_record(self.spec.records, pid=child.pid, name=self.spec.name)

    def _on_output(self, data: bytes) -> None:
        lines = self._output.feed(data)
        self._report.feed(lines)
        self.releases.feed(lines)

    def _unlink_socket(self) -> None:
        # The engine leaves its socket behind and refuses to bind over a stale one.
        if self.spec.endpoint.socket is not None:
            with suppress(OSError):
                self.spec.endpoint.socket.unlink(missing_ok=True)
