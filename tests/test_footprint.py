"""What an engine takes: its whole family, pages read from disk, and what GPU drivers write into /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from app.footprint import Footprint, footprint

_PAGE = os.sysconf("SC_PAGE_SIZE")


def process(proc: Path, pid: int, *, faults: int, pages: int, children: str = "", name: str = "llama-server") -> None:
    before, between = ["S", *["0"] * 8], ["0"] * 11
    stat = f"{pid} ({name}) {' '.join([*before, str(faults), *between, str(pages)])} 0"
    (proc / f"{pid}/task/{pid}").mkdir(parents=True)
    (proc / f"{pid}/stat").write_text(stat)
    (proc / f"{pid}/task/{pid}/children").write_text(children)


def descriptor(proc: Path, pid: int, number: int, target: str, description: str) -> None:
    (proc / f"{pid}/fd").mkdir(exist_ok=True)
    (proc / f"{pid}/fdinfo").mkdir(exist_ok=True)
    (proc / f"{pid}/fd/{number}").symlink_to(target)
    (proc / f"{pid}/fdinfo/{number}").write_text(description)


def test_a_wrapper_counts_together_with_its_engine(tmp_path: Path) -> None:
    process(tmp_path, 10, faults=1, pages=2, children="11 ", name="a (b) c")
    process(tmp_path, 11, faults=5, pages=100)
    assert footprint(10, proc=tmp_path) == Footprint(102 * _PAGE, 6)


def test_a_process_that_is_gone_has_none(tmp_path: Path) -> None:
    assert footprint(10, proc=tmp_path) is None


def test_each_gpu_context_counts_once(tmp_path: Path) -> None:
    process(tmp_path, 10, faults=0, pages=1)
    memory = "drm-memory-vram:\t2048 KiB\ndrm-memory-gtt: \t1 MiB\n"
    amd = "drm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t7\n" + memory
    descriptor(tmp_path, 10, 3, "/dev/dri/renderD128", amd)
    descriptor(tmp_path, 10, 4, "/dev/dri/renderD128", amd)
    descriptor(tmp_path, 10, 5, "/dev/dri/renderD128", amd.replace("\t7\n", "\t8\n"))
    descriptor(tmp_path, 10, 6, "/dev/null", amd.replace("\t7\n", "\t9\n"))
    descriptor(tmp_path, 10, 7, "/dev/dri/renderD128", "pos: 0\n")
    found = footprint(10, proc=tmp_path)
    assert found == Footprint(_PAGE, 0, 2 << 20, {"0000:03:00.0": 4 << 20})


def test_what_nvidias_driver_says_is_added(tmp_path: Path) -> None:
    process(tmp_path, 10, faults=0, pages=1, children="11")
    process(tmp_path, 11, faults=0, pages=1)
    found = footprint(10, proc=tmp_path, nvidia={11: {"RTX": 5 << 20}, 12: {"RTX": 1 << 30}})
    assert found is not None
    assert dict(found.device_bytes) == {"RTX": 5 << 20}


def test_a_real_process() -> None:
    program = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # Before its first word it may still be a copy of us.
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        found = footprint(child.pid)
        assert found is not None
        assert found.resident_bytes > 1 << 20
    finally:
        child.communicate(b"\n", timeout=10)
    assert footprint(child.pid) is None
