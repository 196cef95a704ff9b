"""One operating system process in its own session: spawned, listened to, signalled, reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_LAUNCHER = Path(__file__).with_name("launcher.py")
# How long the last words of a dead process may take to arrive; a grandchild may keep the pipe open for ever.
_LAST_WORDS_SECONDS = 0.25
_KILLED_SECONDS = 5.0
_SECOND_TERM_SECONDS = 1.0
_POLL_SECONDS = 0.02


class Child:
    """A process that dies with us (on Linux) and whose whole group goes when it goes.

    The end is read from the process itself (pidfd), never from its pipe.
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
            child.signal_group(signal.SIGKILL)
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

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to every process of the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def reap(self, *, grace_seconds: float) -> int | None:
        """TERM to the group, grace, KILL to the whole tree, wait; the exit code, negative for a signal.

        None for a process that even SIGKILL does not end within five seconds: a driver holds it inside the kernel.
        """
        family = self._descendants()
        if not self._exited.is_set():
            self.signal_group(signal.SIGTERM)
            await self._wait_at_most(min(_SECOND_TERM_SECONDS, grace_seconds))
        if not self._exited.is_set():
            # With a stream open llama-server may wait for its next ping; it takes a second signal as "now".
            self.signal_group(signal.SIGTERM)
            await self._wait_at_most(max(0.0, grace_seconds - _SECOND_TERM_SECONDS))
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
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def anonymous_bytes(self) -> int:
        """Resident size without mapped files, where the system tells them apart; 0 when it is gone."""
        try:
            memory = psutil.Process(self.pid).memory_info()
        except psutil.Error:
            return 0
        return max(0, int(memory.rss) - int(getattr(memory, "shared", 0)))

    def cpu_seconds(self) -> float:
        """Processor time that it has used, 0 when it is gone."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def bytes_read(self) -> int:
        """What it has read so far, from disk or cache; 0 where the system does not count that."""
        try:
            counters = psutil.Process(self.pid).io_counters()
        except (AttributeError, OSError, psutil.Error):
            return 0
        return int(counters.read_bytes) + int(getattr(counters, "read_chars", 0))

    async def _listen(self, on_output: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watch_exit(), name=f"exit of {self.pid}")
        transport, _ = await loop.connect_read_pipe(
            lambda: _OutputProtocol(on_output, self._output_ended), self._popen.stdout
        )
        self._transport = transport

    async def _watch_exit(self) -> None:
        try:
            await _pidfd_readable(self.pid)
        except (AttributeError, OSError):
            # No pidfd: not Linux, or a sandbox that forbids it.
            while self._popen.poll() is None:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(_POLL_SECONDS)
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
        self.signal_group(signal.SIGKILL)
        # Those that left the group; psutil makes sure that a pid was not given to somebody else meanwhile.
        for process in family:
            with suppress(psutil.Error):
                process.kill()

    async def _close_output(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._output_ended.wait(), _LAST_WORDS_SECONDS)
        if self._transport is not None:
            self._transport.close()


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
    return subprocess.Popen(
        _with_parent_death_signal(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )


def _with_parent_death_signal(argv: Sequence[str]) -> list[str]:
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *argv]


async def _pidfd_readable(pid: int) -> None:
    """Until the process has ended, without reaping it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, readable.set)
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
