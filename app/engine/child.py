"""One operating system process in its own session: spawned, listened to, signalled, reaped."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from app.engine import exit_watch, process_group

if sys.platform == "win32":
    # Its pipes are of the only kind that Windows' loop can read.
    from asyncio.windows_utils import Popen as _Popen
else:
    from subprocess import Popen as _Popen

# How long the last words of a dead process may take to arrive; a grandchild may keep the pipe open for ever.
_LAST_WORDS_SECONDS = 0.25
_KILLED_SECONDS = 5.0
_SECOND_TERM_SECONDS = 1.0


class Child:
    """A process that dies with us and whose whole group goes when it goes.

    The end is read from the process itself (pidfd or handle), never from its pipe.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._transport: asyncio.ReadTransport | None = None
        self._output_ended = asyncio.Event()
        self._exited = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls, argv: Sequence[str], environment: Mapping[str, str], on_output: Callable[[bytes], None]
    ) -> Child:
        """Start ``argv``; ``on_output`` gets what it prints on either stream. Raises OSError when it cannot start.

        Must be called on the thread that lives as long as the gateway: the parent-death signal follows the thread.
        """
        popen = _start(argv, environment)
        child = cls(popen)
        try:
            await child._listen(on_output)
        except BaseException:
            process_group.end(popen)
            popen.wait()
            raise
        return child

    @property
    def pid(self) -> int:
        """The process, and the group it leads."""
        return self._popen.pid

    async def wait(self) -> None:
        """Until the process has ended; it is not reaped yet, so its pid and its group are still its own."""
        await self._exited.wait()

    async def reap(self, *, grace_seconds: float) -> int | None:
        """TERM to the group, grace, KILL to the whole tree, wait; the exit code, negative for a signal.

        None for a process that even SIGKILL does not end within five seconds: a driver holds it inside the kernel.
        """
        family = self._descendants()
        if not self._exited.is_set() and process_group.ask_to_end(self._popen):
            await self._wait_at_most(min(_SECOND_TERM_SECONDS, grace_seconds))
        # With a stream open llama-server may wait for its next ping; it takes a second signal as "now".
        if not self._exited.is_set() and process_group.ask_to_end(self._popen):
            await self._wait_at_most(max(0.0, grace_seconds - _SECOND_TERM_SECONDS))
        if not self._exited.is_set():
            family += self._descendants()
        self._kill(family)
        await self._wait_at_most(_KILLED_SECONDS)
        await self._close_output()
        if not self._exited.is_set():
            return None
        return self._popen.wait()

    def kill_now(self) -> int:
        """KILL and wait without the event loop, for when that is being torn down."""
        self._kill(self._descendants())
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.close()
        return self._popen.wait()

    def resident_bytes(self) -> int:
        """Resident size, 0 when it is gone."""
        return int(self._sum(lambda process: process.memory_info().rss))

    def anonymous_bytes(self) -> int:
        """Resident size without mapped files, where the system tells them apart; 0 when it is gone."""
        return int(self._sum(_anonymous_bytes))

    def cpu_seconds(self) -> float:
        """Processor time that it has used, 0 when it is gone."""
        return self._sum(_cpu_seconds)

    def bytes_read(self) -> int:
        """What it has read so far, from disk or cache; 0 where the system does not count that."""
        return int(self._sum(_bytes_read))

    def _sum(self, figure: Callable[[psutil.Process], float]) -> float:
        """Of the process; on Windows with what it started: in a virtual environment python.exe starts the real one."""
        try:
            total = figure(psutil.Process(self.pid))
        except (AttributeError, OSError, psutil.Error):
            return 0
        if sys.platform == "win32":
            for descendant in self._descendants():
                with suppress(psutil.Error):
                    total += figure(descendant)
        return total

    async def _listen(self, on_output: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watch_exit(), name=f"exit of {self.pid}")
        transport, _ = await loop.connect_read_pipe(
            lambda: _OutputProtocol(on_output, self._output_ended), self._popen.stdout
        )
        self._transport = transport

    async def _watch_exit(self) -> None:
        await exit_watch.ended(self._popen)
        self._exited.set()

    async def _wait_at_most(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _kill(self, family: Sequence[psutil.Process]) -> None:
        process_group.end(self._popen)
        # Those that left the group; psutil makes sure that a pid was not given to somebody else meanwhile.
        for process in family:
            with suppress(psutil.Error):
                process.kill()

    async def _close_output(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._output_ended.wait(), _LAST_WORDS_SECONDS)
        if self._transport is not None:
            self._transport.close()


def _anonymous_bytes(process: psutil.Process) -> int:
    memory = process.memory_info()
    if sys.platform == "win32":
        own_bytes = int(memory.private)
    else:
        own_bytes = int(memory.rss) - int(getattr(memory, "shared", 0))
    return max(0, own_bytes)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _bytes_read(process: psutil.Process) -> int:
    counters = process.io_counters()
    return int(counters.read_bytes) + int(getattr(counters, "read_chars", 0))


class _OutputProtocol(asyncio.Protocol):
    def __init__(self, on_output: Callable[[bytes], None], ended: asyncio.Event) -> None:
        self._on_output = on_output
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._on_output(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()


def _start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # Not the event loop's own spawning: its wait() also waits for the end of the pipes, and uvloop's leaves copies of
    # them in the child. This one blocks for the milliseconds of a vfork.
    return _Popen(
        process_group.dying_with_us(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        creationflags=process_group.creation_flags(),
    )
