"""Child processes of the benchmark: started in their own session, ended by pid, measured through /proc."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path


class CannotRun(Exception):
    """A participant cannot be measured here; the message is the sentence to print."""


@contextlib.contextmanager
def running(
    argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `argv`, both outputs into `log`; TERM at the end, KILL after ten seconds, always reaped."""
    with log.open("ab") as output:
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )
        except OSError as error:
            raise CannotRun(f"{argv[0]} does not start: {error.strerror}.") from error
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_until(
    ready: Callable[[], bool], child: subprocess.Popen[bytes], *, what: str, log: Path, seconds: float
) -> None:
    """Polls `ready`; raises CannotRun with the end of the log when the child dies or the time is over."""
    deadline = time.monotonic() + seconds
    while not ready():
        if child.poll() is not None or time.monotonic() > deadline:
            state = "is not ready in time" if child.returncode is None else f"exited with {child.returncode}"
            tail = log.read_text(errors="replace")[-1500:].strip()
            raise CannotRun(f"{what} {state}. The end of its log:\n{tail}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes, ended threads included and children not.

    To the nanosecond, by the CPU-time clock of another process (clock_getcpuclockid(3); the kernel's ABI makes its
    number of the pid), where /proc counts ticks of 10 ms.
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def resident_bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.partition("VmRSS:")[2].split()[0]) * 1024
    return total


def children(pid: int) -> list[int]:
    return [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]
