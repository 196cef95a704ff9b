"""A Windows Job Object around this process: whatever ends the gateway ends everything that it has started.

The gateway puts itself into the job before it starts anything, so that engines are in it from birth. An engine that was
put there after its start would be left behind by a gateway that is ended in between. The only handle is ours, and not
inherited: the system closes it with our process, and the closing ends whatever else is in the job. Nothing may break
away. Jobs nest (since Windows 8), so one that is around us already, of a terminal or a service wrapper, does no harm.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys

assert sys.platform == "win32"
from ctypes import wintypes  # noqa: E402 - there is none elsewhere

_log = logging.getLogger(__name__)

_EXTENDED_LIMIT_INFORMATION = 9
_LIMIT_KILL_ON_JOB_CLOSE = 0x2000


class _BasicLimits(ctypes.Structure):
    """JOBOBJECT_BASIC_LIMIT_INFORMATION."""

    _fields_ = (
        ("per_process_user_time_limit", wintypes.LARGE_INTEGER),
        ("per_job_user_time_limit", wintypes.LARGE_INTEGER),
        ("limit_flags", wintypes.DWORD),
        ("minimum_working_set_size", ctypes.c_size_t),
        ("maximum_working_set_size", ctypes.c_size_t),
        ("active_process_limit", wintypes.DWORD),
        ("affinity", ctypes.c_size_t),
        ("priority_class", wintypes.DWORD),
        ("scheduling_class", wintypes.DWORD),
    )


class _ExtendedLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("basic", _BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory_limit", ctypes.c_size_t),
        ("job_memory_limit", ctypes.c_size_t),
        ("peak_process_memory_used", ctypes.c_size_t),
        ("peak_job_memory_used", ctypes.c_size_t),
    )


@functools.cache
def end_children_with_us() -> None:
    """From now on, nothing that this process starts outlives it; where the system refuses that, a warning says so."""
    kernel = _kernel()
    job = kernel.CreateJobObjectW(None, None)
    limits = _ExtendedLimits()
    limits.basic.limit_flags = _LIMIT_KILL_ON_JOB_CLOSE
    about, size = ctypes.byref(limits), ctypes.sizeof(limits)
    is_set = job and kernel.SetInformationJobObject(job, _EXTENDED_LIMIT_INFORMATION, about, size)
    if not (is_set and kernel.AssignProcessToJobObject(job, kernel.GetCurrentProcess())):
        # Windows before 8 inside another job; the records of the state folder are left to clean up.
        _log.warning(
            "engines are in no job (%s): a gateway that is killed leaves them",
            ctypes.WinError(ctypes.get_last_error()).strerror,
        )


def _kernel() -> ctypes.WinDLL:
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateJobObjectW.restype = wintypes.HANDLE
    kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, wintypes.LPCWSTR)
    kernel.SetInformationJobObject.argtypes = (wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD)
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    kernel.AssignProcessToJobObject.argtypes = (wintypes.HANDLE, wintypes.HANDLE)
    return kernel
