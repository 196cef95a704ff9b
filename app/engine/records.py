"""What this gateway has started, on disk, so that the next one can end what a crash left behind, and nothing else."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil

_log = logging.getLogger(__name__)

_KILLED_SECONDS = 5.0
INSTANCE_VARIABLE = "GATEWAY_ENGINE_OF"
"""In the environment of every engine: the state folder it belongs to, inherited by whatever it starts."""


@dataclass(frozen=True, slots=True)
class Record:
    """One process; ``started`` tells it from a later one with the same number."""

    pid: int
    started: float
    boot: str
    name: str


def write_record(folder: Path, *, pid: int, name: str) -> Path | None:
    """Note a process; None when it is gone already or the disk is full: serving goes on without."""
    file = folder / f"{secrets.token_hex(8)}.json"
    try:
        record = Record(pid, _started(pid), _boot(), name)
        file.write_bytes(orjson.dumps(asdict(record)))
    except (OSError, psutil.Error) as error:
        _log.warning("cannot note engine %d in %s: %s", pid, folder, error)
        return None
    return file


def end_orphans(folder: Path, *, instance: str) -> list[int]:
    """End what earlier gateways of this state folder left running, and forget their records; the pids that were ended.

    Call it only while no other gateway uses the folder.
    """
    orphans = {process.pid: process for process in (*_recorded(folder), *_marked(instance))}
    for process in list(orphans.values()):
        with suppress(psutil.Error):
            orphans |= {child.pid: child for child in process.children(recursive=True)}
    for process in orphans.values():
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(orphans.values()), timeout=_KILLED_SECONDS)
    for file in folder.glob("*.json"):
        file.unlink(missing_ok=True)
    return sorted(orphans)


def _recorded(folder: Path) -> Iterator[psutil.Process]:
    for file in folder.glob("*.json"):
        try:
            record = Record(**orjson.loads(file.read_bytes()))
            if record.boot == _boot() and _started(record.pid) == record.started and record.pid != os.getpid():
                yield psutil.Process(record.pid)
        except (OSError, TypeError, ValueError, psutil.Error):
            # Half-written, of another version, or of a process that is gone.
            continue


def _marked(instance: str) -> Iterator[psutil.Process]:
    """Processes that carry our mark: an engine's own children, which no record names."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(INSTANCE_VARIABLE) == instance:
                yield process
        except (psutil.Error, OSError):
            continue


def _started(pid: int) -> float:
    """When it started, by a clock that nobody sets: ticks since boot on Linux, else seconds."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return psutil.Process(pid).create_time()
    # The name in parentheses may hold anything; field 22 of proc(5) is the 20th after it.
    return float(stat.rpartition(")")[2].split()[19])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
