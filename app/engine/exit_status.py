"""What an exit code tells of a process's end: a signal on POSIX, on Windows the NTSTATUS of an exception."""

from __future__ import annotations

import signal
from enum import StrEnum


class Ending(StrEnum):
    """How a process was ended from outside its own program, in words that a sentence can be made of."""

    ILLEGAL_INSTRUCTION = "an illegal instruction"
    MISSING_LIBRARY = "a missing library"
    NO_MEMORY = "lack of memory"
    KILLED = "SIGKILL"
    OTHER = "an exception"


# Windows SDK, ntstatus.h. A process that is ended by another one has whatever exit code that one chose.
_STATUS = {
    0xC0000005: ("access violation", Ending.OTHER),
    0xC0000017: ("no memory", Ending.NO_MEMORY),
    0xC000001D: ("illegal instruction", Ending.ILLEGAL_INSTRUCTION),
    0xC000007B: ("library for another kind of machine", Ending.MISSING_LIBRARY),
    0xC000009A: ("insufficient resources", Ending.NO_MEMORY),
    0xC00000FD: ("stack overflow", Ending.OTHER),
    0xC000012D: ("commitment limit", Ending.NO_MEMORY),
    0xC0000135: ("library not found", Ending.MISSING_LIBRARY),
    0xC0000138: ("function not found in a library", Ending.MISSING_LIBRARY),
    0xC0000139: ("function not found in a library", Ending.MISSING_LIBRARY),
    0xC000013A: ("Ctrl+C", Ending.OTHER),
    0xC0000142: ("library that does not start", Ending.OTHER),
    0xC0000374: ("heap corruption", Ending.OTHER),
    0xC0000409: ("abort", Ending.OTHER),
}
_FIRST_EXCEPTION = 0xC0000000
_SIGILL, _SIGKILL = 4, 9  # Windows' Python has not both of these names


def ending_of(returncode: int | None) -> Ending | None:
    """How a process was ended; None when it left by itself, or never ran."""
    if returncode is None:
        return None
    if returncode >= _FIRST_EXCEPTION:
        return _STATUS.get(returncode, ("", Ending.OTHER))[1]
    number = _signal_of(returncode)
    if number is None:
        return None
    return {_SIGILL: Ending.ILLEGAL_INSTRUCTION, _SIGKILL: Ending.KILLED}.get(number, Ending.OTHER)


def name_of(returncode: int) -> str:
    """What ended it, such as ``SIGSEGV`` or ``access violation (0xC0000005)``."""
    if returncode >= _FIRST_EXCEPTION:
        return f"{_STATUS.get(returncode, ('exception', None))[0]} (0x{returncode:08X})"
    number = _signal_of(returncode)
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _signal_of(returncode: int) -> int | None:
    if returncode < 0:
        return -returncode
    # A shell around the program reports a signal this way.
    return returncode - 128 if 128 < returncode < 160 else None
