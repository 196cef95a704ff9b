"""What NVIDIA's driver says of its devices; nothing where there is no driver."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
AT = " @ "
"""What stands between the name of a device that is not the only one of its kind and its address."""


def memory() -> Iterator[tuple[str, int, int, int]]:
    """Name, total, used and free bytes of each device."""
    if (nvml := _nvml()) is None:
        return
    for name, handle in _devices(nvml):
        with suppress(nvml.NVMLError):
            read = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield name, int(read.total), int(read.used), int(read.free)


def process_memory() -> Iterator[tuple[str, int, int]]:
    """Device name, pid and bytes of each process on each device, as far as the driver tells."""
    if (nvml := _nvml()) is None:
        return
    for name, handle in _devices(nvml):
        with suppress(nvml.NVMLError):
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


def _devices(nvml: ModuleType) -> Iterator[tuple[str, Any]]:
    """Names, no two of them the same, and handles, to be used while they are iterated over."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        found = list(_answering(nvml))
        models = Counter(model for model, _, _ in found)
        for model, address, handle in found:
            yield model if models[model] == 1 else f"{model}{AT}{address}", handle
    except nvml.NVMLError:
        return
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _answering(nvml: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """Model, address on the PCI bus (such as ``0000:01:00.0``) and handle of each device."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            address = str(nvml.nvmlDeviceGetPciInfo(handle).busIdLegacy)
            yield str(nvml.nvmlDeviceGetName(handle)), address, handle
