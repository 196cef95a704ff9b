"""Run a program in a console of its own; a line on our input is Ctrl+C there. For a Windows Python; its exit code."""

from __future__ import annotations

import ctypes
import subprocess
import sys

assert sys.platform == "win32"

from app.engine.job_object import end_children_with_us  # noqa: E402 - there is none elsewhere

_CTRL_C = 0


def main(command: list[str]) -> int:
    # Whoever ends us ends the program too.
    end_children_with_us()
    kernel = ctypes.WinDLL("kernel32")
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, creationflags=subprocess.CREATE_NO_WINDOW)
    sys.stdin.readline()
    kernel.FreeConsole()
    # The key is pressed for all that are in that console, so for us too.
    kernel.SetConsoleCtrlHandler(None, True)
    if not (kernel.AttachConsole(program.pid) and kernel.GenerateConsoleCtrlEvent(_CTRL_C, 0)):
        program.kill()
    return program.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
