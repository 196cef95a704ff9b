"""One gateway per state folder: a lock, a private folder for sockets, and what a crash left behind ended first."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from app.engine.records import end_orphans
from app.errors import StorageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_log = logging.getLogger(__name__)

# sun_path holds 107 bytes and a socket's file name takes 14 with its slash; Windows' engines listen on ports.
_LONGEST_RUN_DIR = 107 - 14 if sys.platform != "win32" else 1 << 15
# Windows lets nobody read what is locked: a byte far behind what the file holds.
_LOCKED_BYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Instance:
    """``run_dir`` holds sockets, ``records`` the processes that we started; ``name`` marks them as ours."""

    run_dir: Path
    records: Path
    name: str


@contextmanager
def open_instance(state_dir: Path) -> Iterator[Instance]:
    """Take the state folder until the block ends.

    Raises StorageError when another gateway has it or it cannot be written. Engines of a gateway that was killed are
    ended, and only those: each is known by its start time or by the mark in its environment.
    """
    try:
        records = state_dir / "engines"
        records.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (state_dir / "gateway.lock").open("a+b")
    except OSError as error:
        raise _not_writable(state_dir, error) from None
    with lock:
        _take(lock, state_dir)
        name = str(state_dir.resolve())
        for pid in end_orphans(records, instance=name):
            _log.warning("ended process %d, which an earlier gateway of this state folder had left behind", pid)
        run_dir = _make_run_dir(state_dir)
        try:
            yield Instance(run_dir, records, name)
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)


def _take(lock: BufferedRandom, state_dir: Path) -> None:
    """The lock is the system's: it ends with the process, however that ends."""
    try:
        if sys.platform == "win32":
            lock.seek(_LOCKED_BYTE)
            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read(32).decode("ascii", "replace").strip()
        raise StorageError(
            f"Another gateway (process {holder or 'unknown'}) uses the state folder {state_dir}; stop it, or give this "
            "one its own state_dir (LLAMA_GATEWAY_STATE_DIR in the environment)."
        ) from None
    lock.truncate(0)
    lock.write(b"%d\n" % os.getpid())
    lock.flush()


def _make_run_dir(state_dir: Path) -> Path:
    """A private folder for this process's sockets; those of earlier gateways are removed first."""
    run_dir = state_dir / "run" / str(os.getpid())
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left_behind in run_dir.parent.iterdir():
            if left_behind.name.isdecimal():
                shutil.rmtree(left_behind, ignore_errors=True)
        if len(os.fsencode(run_dir)) > _LONGEST_RUN_DIR:
            return Path(tempfile.mkdtemp(prefix="llama-gateway-"))
        with suppress(FileExistsError):
            run_dir.mkdir(mode=0o700)
    except OSError as error:
        raise _not_writable(state_dir, error) from None
    return run_dir


def _not_writable(state_dir: Path, error: OSError) -> StorageError:
    return StorageError(
        f"Cannot write to {state_dir} ({error.strerror}); set state_dir to a folder that this user may write."
    )
