"""A process and what it starts, in a group of their own that ends with us: how each system starts and ends one.

Linux: a session, and a signal at our death (``launcher.py``). Windows: a console group, and a job (``job_object.py``).
macOS has sessions only; there the records of the state folder clean up after a gateway that was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

if sys.platform == "win32":
    import psutil

    from app.engine import job_object

_LAUNCHER = Path(__file__).with_name("launcher.py")


def dying_with_us(argv: Sequence[str]) -> list[str]:
    """The command that starts ``argv`` so that the system ends it with the calling thread, where that takes another."""
    launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid())] if sys.platform == "linux" else []
    return [*launcher, *argv]


def creation_flags() -> int:
    """For ``Popen``, beside ``start_new_session=True``, which Windows does not know; 0 elsewhere."""
    flags = 0
    if sys.platform == "win32":
        job_object.end_children_with_us()
        # A group of its own, or Ctrl+C at our console would end the engines before their streams.
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
    return flags


def ask_to_end(process: subprocess.Popen[bytes]) -> bool:
    """TERM to the group, on Windows Ctrl+Break; False where nobody can be asked: a service without a console."""
    was_asked = True
    if sys.platform == "win32":
        try:
            os.kill(process.pid, signal.CTRL_BREAK_EVENT)
        except OSError:
            was_asked = False
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
    return was_asked


def end(process: subprocess.Popen[bytes]) -> None:
    """KILL to the whole group; Windows knows no such thing, there it ends what the process has started one by one."""
    if sys.platform == "win32":
        family = _descendants(process.pid)
        with suppress(PermissionError):
            process.kill()
        for descendant in family:
            with suppress(psutil.Error):
                descendant.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


if sys.platform == "win32":

    def _descendants(pid: int) -> list[psutil.Process]:
        try:
            return psutil.Process(pid).children(recursive=True)
        except psutil.Error:
            return []
