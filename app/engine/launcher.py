"""Turn into another program that the kernel ends together with our parent: ``launcher.py PARENT_PID PROGRAM ARGS…``.

Run by path with ``python -I -S``; needs the standard library alone. A ``preexec_fn`` could do the same between fork and
exec, but is not safe in a process with threads; ``setpriv --pdeathsig`` does not notice a parent that is already gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

assert sys.platform != "win32"  # jobs do this there

_PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126
# The kernel, short of memory, ends the engine and spares the gateway, which can start it again.
_OOM_SCORE_ADJUST = "500"


def main(arguments: list[str]) -> int:
    """Replace this process by the program; returns only when that fails."""
    parent, command = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print("launcher: no parent-death signal", file=sys.stderr)
    if os.getppid() != parent:
        return CANNOT_EXECUTE
    # Only a hint: some containers have a read-only /proc.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_SCORE_ADJUST)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"launcher: cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
    return CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
