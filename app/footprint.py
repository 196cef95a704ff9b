"""What one engine takes of the machine: RAM, pages read from disk, device memory where its driver says."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_PROC = Path("/proc")
# Positions in /proc/PID/stat, counted from the state behind the name (proc(5)).
_MAJOR_FAULTS = 9
_RESIDENT_PAGES = 21
_PAGE_BYTES = mmap.PAGESIZE
# The kernel's common keys of DRM drivers (drm-usage-stats): amdgpu, i915 and xe write them.
_DRM_LINE = re.compile(r"^(drm-[\w-]+):\s*(\S+)(?: (KiB|MiB))?", re.MULTILINE)
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of an engine and everything that it started; ``shared_bytes`` is RAM that a GPU driver uses for it."""

    resident_bytes: int = 0
    major_faults: int = 0
    shared_bytes: int = 0
    device_bytes: Mapping[str, int] = field(default_factory=dict)


def footprint(
    pid: int, *, nvidia: Mapping[int, Mapping[str, int]] | None = None, proc: Path = _PROC
) -> Footprint | None:
    """The footprint now, None when the process is gone; ``nvidia`` is what its driver says of all processes."""
    family = list(_family(pid, proc))
    figures = [found for one in family if (found := _stat(proc / str(one))) is not None]
    if not figures:
        return _elsewhere(pid) if proc == _PROC and not proc.is_dir() else None
    device_bytes: dict[str, int] = {}
    shared_bytes = 0
    for one in family:
        for device, size_bytes in (nvidia or {}).get(one, {}).items():
            device_bytes[device] = device_bytes.get(device, 0) + size_bytes
        for client in _drm_clients(proc / str(one)):
            device = client.device
            device_bytes[device] = device_bytes.get(device, 0) + client.device_bytes
            shared_bytes += client.shared_bytes
    faults, resident = (sum(column) for column in zip(*figures, strict=True))
    return Footprint(resident, faults, shared_bytes, device_bytes)


def _family(pid: int, proc: Path) -> Iterator[int]:
    """The process and its descendants; a wrapper script may stand before the engine."""
    yield pid
    for children in (proc / str(pid) / "task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from _family(int(child), proc)


def _stat(process: Path) -> tuple[int, int] | None:
    """Major faults and resident bytes."""
    try:
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[_MAJOR_FAULTS]), int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class _DRMClient:
    device: str
    device_bytes: int
    shared_bytes: int


def _drm_clients(process: Path) -> Iterator[_DRMClient]:
    """Each open GPU context once, however many descriptors lead to it."""
    seen: set[tuple[str, str]] = set()
    for descriptor in _descriptors(process):
        try:
            entries = {found[1]: found for found in _DRM_LINE.finditer(descriptor.read_text(errors="replace"))}
        except OSError:
            continue
        device = entries["drm-pdev"][2] if "drm-pdev" in entries else ""
        client = entries["drm-client-id"][2] if "drm-client-id" in entries else ""
        if not client or (device, client) in seen:
            continue
        seen.add((device, client))
        yield _DRMClient(device, _drm_bytes(entries, "vram"), _drm_bytes(entries, "gtt"))


def _descriptors(process: Path) -> Iterator[Path]:
    """Descriptions of descriptors that lead to a GPU; the others are not worth reading."""
    try:
        for link in os.scandir(process / "fd"):
            with suppress(OSError):
                if os.readlink(link.path).startswith("/dev/dri/"):
                    yield process / "fdinfo" / link.name
    except OSError:
        return


def _drm_bytes(entries: Mapping[str, re.Match[str]], region: str) -> int:
    for name in (f"drm-resident-{region}", f"drm-memory-{region}", f"drm-total-{region}0", f"drm-total-{region}"):
        if (found := entries.get(name)) is not None and found[2].isdecimal():
            return int(found[2]) * _UNITS[found[3] or ""]
    return 0


def _elsewhere(pid: int) -> Footprint | None:
    """Where there is no /proc."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return Footprint(sum(int(one.memory_info().rss) for one in family))
    except psutil.Error:
        return None
