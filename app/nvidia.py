"""What NVIDIA's driver says of its devices; nothing where there is no driver."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


def memory() -> Iterator[tuple[str, int, int, int]]:
    """Name, total, used and free bytes of each device."""
    if (nvml := _nvml()) is None:
        return
    for handle in _devices(nvml):
        with suppress(nvml.NVMLError):
            read = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield str(nvml.nvmlDeviceGetName(handle)), int(read.total), int(read.used), int(read.free)


def process_memory() -> Iterator[tuple[str, int, int]]:
    """Device name, pid and bytes of each process on each device, as far as the driver tells."""
    if (nvml := _nvml()) is None:
        return
    for handle in _devices(nvml):
        with suppress(nvml.NVMLError):
            name = str(nvml.nvmlDeviceGetName(handle))
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.usedGpuMemory is not None:
                    yield name, int(process.pid), int(process.usedGpuMemory)


def _nvml() -> ModuleType | None:
    """The binding, which is imported only where its library is: without one it costs 5 MB and is of no use."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
    return import_module("pynvml")


def _devices(nvml: ModuleType) -> Iterator[Any]:
    """Handles, to be used while they are iterated over."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                yield nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:
        return
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
