"""Does the kernel end processes for memory? It says so in counters, never to the process itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(*, root: Path = Path("/")) -> Mapping[Path, int]:
    """How many processes the kernel has ended for memory, by every counter that there is: control group and system."""
    counters: dict[Path, int] = {}
    for file in _counter_files(root):
        try:
            found = _OOM_KILLS.search(file.read_text(encoding="ascii", errors="replace"))
        except OSError:
            continue
        if found:
            counters[file] = int(found[1])
    return counters


def kills_between(before: Mapping[Path, int], after: Mapping[Path, int]) -> int | None:
    """Kills between two readings by the counter that saw most; None where nothing counts them."""
    return max((count - before[file] for file, count in after.items() if file in before), default=None)


def _counter_files(root: Path) -> Iterator[Path]:
    yield root / "proc/vmstat"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        group = path.lstrip("/")
        if controllers == "":
            # Inside a container the mount may show only our part of the tree.
            yield root / "sys/fs/cgroup" / group / "memory.events"
            yield root / "sys/fs/cgroup/memory.events"
        elif "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory" / group / "memory.oom_control"
            yield root / "sys/fs/cgroup/memory/memory.oom_control"
