"""What the machine has now: devices, RAM under control groups, cores that may be used."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from app import nvidia

if sys.platform != "win32":
    import resource

_ROOT = Path("/")
_MIB = 1 << 20
# The description may hold parentheses and commas; the sizes are the last parenthesis of the line.
_DEVICE_LINE = re.compile(r"^  (\S+): (.*) \((\d+) MiB, (\d+) MiB free\)\s*$", re.MULTILINE)
# Two readings of one device's size by different drivers may differ by what firmware keeps for itself.
_SAME_SIZE = 0.05
# Less is what a processor's own graphics keeps of the RAM, which is no loss to a model.
_LEAST_CARD_BYTES = 3 << 30
_HOLDERS_NAMED = 3
# A core that is slower than this share of the fastest one is an efficiency core.
_PERFORMANCE_SHARE = 0.5
# cgroup v1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


# What engines are built for, by the kernel's names of it, oldest first.
_CPU_FLAGS = {
    "avx": "AVX", "f16c": "F16C", "fma": "FMA", "avx2": "AVX2", "bmi2": "BMI2",
    "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI", "avx_vnni": "AVX-VNNI", "amx_tile": "AMX",
}  # fmt: skip
CPU_FEATURES = tuple(_CPU_FLAGS.values())
"""Features of x86 CPUs that make an engine fast, or that one was built for."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator as the engine names it (``CUDA0``, ``Vulkan1`` …), with what is free on it now."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """An accelerator's memory as its driver sees it, whoever uses it; no two on a machine have the same name."""

    name: str
    total_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything a plan depends on; ``threads`` is the number of compute threads worth starting.

    ``unseen_devices`` are names of those whose driver answers although the engine lists none at all.
    """

    devices: tuple[Device, ...]
    ram_total_bytes: int
    ram_available_bytes: int
    threads: int
    unseen_devices: tuple[str, ...] = ()


def parse_device_list(text: str) -> tuple[Device, ...]:
    """The devices in the output of the engine's ``--list-devices``; none for ``(none)``."""
    return tuple(
        Device(found[1], found[2], int(found[3]) * _MIB, int(found[4]) * _MIB) for found in _DEVICE_LINE.finditer(text)
    )


def probe_machine(device_list: str, *, root: Path = _ROOT) -> Machine:
    """The machine as it is now; ``device_list`` is the engine's own list, ``root`` where ``/proc`` and ``/sys`` lie."""
    total, available = ram_bytes(root=root)
    drivers = device_memory(root=root)
    devices = with_driver_memory(parse_device_list(device_list), drivers)
    unseen = () if devices else tuple(each.name for each in drivers if each.total_bytes >= _LEAST_CARD_BYTES)
    return Machine(devices, total, available, usable_threads(root=root), unseen)


# --- devices ---------------------------------------------------------------------------------------------------------


def device_memory(*, root: Path = _ROOT) -> tuple[DeviceMemory, ...]:
    """Memory of every NVIDIA and AMD device by its driver, cheap enough for a sampler; empty when there is none."""
    # NVML speaks to the driver, not to files: it knows nothing of another root.
    cards = tuple(DeviceMemory(*card) for card in nvidia.memory()) if root == _ROOT else ()
    return cards + tuple(_amd_memory(root))


def with_driver_memory(devices: Sequence[Device], drivers: Iterable[DeviceMemory]) -> tuple[Device, ...]:
    """``devices`` with no more free memory than their driver says.

    A Vulkan driver without a memory budget reports everything as free, whatever other programs hold.
    """
    unmatched = list(drivers)
    merged: list[Device] = []
    for device in devices:
        match = next((driver for driver in unmatched if _same_device(device, driver)), None)
        if match is not None:
            unmatched.remove(match)
            device = replace(device, free_bytes=min(device.free_bytes, match.free_bytes))
        merged.append(device)
    return tuple(merged)


def _same_device(device: Device, driver: DeviceMemory) -> bool:
    alike = abs(device.total_bytes - driver.total_bytes) <= _SAME_SIZE * driver.total_bytes
    # amdgpu's name is a PCI address, which says nothing about the model.
    return alike and (driver.name.partition(nvidia.AT)[0] in device.description or driver.name.startswith("amdgpu"))


def process_device_memory() -> dict[int, dict[str, int]]:
    """Bytes that each process holds on each NVIDIA device, by its driver, which may not say; pid → device → bytes."""
    held: dict[int, dict[str, int]] = {}
    for name, pid, used_bytes in nvidia.process_memory():
        of_process = held.setdefault(pid, {})
        of_process[name] = of_process.get(name, 0) + used_bytes
    return held


def largest_holders(held: Mapping[int, Mapping[str, int]], *, without: Collection[int]) -> str:
    """Who holds most of ``held``, such as ``game (pid 12, 1,900 MiB)``, leaving out ``without``; empty for nobody."""
    sums = {pid: sum(of_process.values()) for pid, of_process in held.items() if pid not in without}
    largest = sorted(sums, key=lambda pid: -sums[pid])[:_HOLDERS_NAMED]
    return ", ".join(f"{_process_name(pid)} (pid {pid}, {sums[pid] / _MIB:,.0f} MiB)" for pid in largest)


def _process_name(pid: int) -> str:
    psutil = _psutil()
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "a program"


def _amd_memory(root: Path) -> Iterator[DeviceMemory]:
    for card in sorted((root / "sys/class/drm").glob("card[0-9]*")):
        total = _number(card / "device/mem_info_vram_total")
        used = _number(card / "device/mem_info_vram_used")
        if total and used is not None:
            yield DeviceMemory(f"amdgpu {card.name}", total, used, max(0, total - used))


# --- RAM -------------------------------------------------------------------------------------------------------------


def ram_bytes(*, root: Path = _ROOT) -> tuple[int, int]:
    """Total and available RAM, each the least of what the system and every control group above us allow."""
    total, available = _system_ram(root)
    for limit, used in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def _system_ram(root: Path) -> tuple[int, int]:
    text = _text(root / "proc/meminfo")
    values = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    if "MemTotal" in values and "MemAvailable" in values:
        return values["MemTotal"], values["MemAvailable"]
    memory = _psutil().virtual_memory()
    return int(memory.total), int(memory.available)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group from ours up to the root; page cache that can be dropped is not use."""
    for group in _groups(root, ""):
        limits = [value for name in ("memory.max", "memory.high") if (value := _number(group / name)) is not None]
        if limits:
            yield min(limits), _used(group, "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
    for group in _groups(root, "memory"):
        limit = _number(group / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            yield limit, _used(group, "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _used(group: Path, usage: str, reclaimable: Iterable[str]) -> int:
    statistics = dict(re.findall(r"^(\w+) (\d+)$", _text(group / "memory.stat"), re.MULTILINE))
    return max(0, (_number(group / usage) or 0) - sum(int(statistics.get(name, 0)) for name in reclaimable))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Our control group and its ancestors; ``controller`` is empty for version 2, else a hierarchy of version 1.

    Inside a container the path may be the host's, while the mount shows only our part: then just its top exists.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        if (controller not in controllers.split(",")) if controller else (controllers != ""):
            continue
        mount = _mount(root, controllers)
        below = [part for part in path.split("/") if part not in {"", ".", ".."}]
        for depth in range(len(below), -1, -1):
            group = mount.joinpath(*below[:depth])
            if group.is_dir():
                yield group


def _mount(root: Path, controllers: str) -> Path:
    base = root / "sys/fs/cgroup"
    if controllers:
        # "cpu,cpuacct" may be mounted under its own name, in another order, or by a link for each part.
        names = [controllers, ",".join(reversed(controllers.split(","))), *controllers.split(",")]
        return next((base / name for name in names if (base / name).is_dir()), base / controllers)
    unified = base / "unified"
    return unified if unified.is_dir() else base


# --- cores -----------------------------------------------------------------------------------------------------------


def usable_threads(*, root: Path = _ROOT) -> int:
    """Physical (on hybrids: performance) cores within our affinity, no more than the CPU quota of any control group."""
    if sys.platform == "win32":
        psutil = _psutil()
        cores = min(psutil.cpu_count(logical=False) or 1, len(psutil.Process().cpu_affinity()))
    else:
        allowed = _allowed_cpus(root)
        fast = _performance_cpus(root, allowed) or allowed
        cores = len({_core(root, cpu) for cpu in fast})
    quotas = [int(quota) for quota in _cpu_quotas(root)]
    return max(1, min([cores, *quotas]))


def cpu_features(*, root: Path = _ROOT) -> tuple[str, ...]:
    """Those of CPU_FEATURES that this CPU has; empty where the kernel does not list them."""
    line = re.search(r"^flags\s*:(.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    present = set(line[1].split()) if line else set()
    return tuple(name for flag, name in _CPU_FLAGS.items() if flag in present)


def open_files_limit() -> int | None:
    """How many files and connections a process of ours may have open; None where that is not limited."""
    limit: int | None = None
    if sys.platform != "win32":
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = None if limit == resource.RLIM_INFINITY else limit
    return limit


def _allowed_cpus(root: Path) -> frozenset[int]:
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(root / "proc/self/status"), re.MULTILINE)
    online = _cpu_list(_text(root / "sys/devices/system/cpu/online"))
    allowed = _cpu_list(found[1]) if found else online
    return (allowed & online if online else allowed) or frozenset(range(os.cpu_count() or 1))


def _performance_cpus(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    """Intel names its performance cores; Arm states how much each core can do; otherwise all cores are alike."""
    intel = _cpu_list(_text(root / "sys/devices/cpu_core/cpus"))
    if intel:
        return intel & allowed
    cpus = root / "sys/devices/system/cpu"
    capacity = {cpu: _number(cpus / f"cpu{cpu}/cpu_capacity") or 0 for cpu in allowed}
    fastest = max(capacity.values(), default=0)
    return frozenset(cpu for cpu, value in capacity.items() if fastest and value > _PERFORMANCE_SHARE * fastest)


def _core(root: Path, cpu: int) -> frozenset[int]:
    """The hardware threads that share a core with ``cpu``."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    text = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
    return _cpu_list(text) or frozenset({cpu})


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    for group in _groups(root, "cpu"):
        microseconds, period_microseconds = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if microseconds and period_microseconds:
            yield microseconds / period_microseconds


def _cpu_list(text: str) -> frozenset[int]:
    """``0-3,8,10-11`` as numbers."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None for a missing file and for words such as ``max`` (and -1, which means the same)."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _psutil() -> ModuleType:
    """Imported where Linux's own files do not say: a plan needs it nowhere else, and waits for it."""
    return import_module("psutil")
