"""The machine as read from file trees laid out here: devices, control groups, cores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.hardware import (
    Device,
    DeviceMemory,
    device_memory,
    largest_holders,
    parse_device_list,
    probe_machine,
    ram_bytes,
    usable_threads,
    with_driver_memory,
)

_TWO_CARDS = Path(__file__).with_name("two_cards.c")
MIB = 1 << 20
GIB = 1 << 30


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def meminfo(total_bytes: int, available_bytes: int) -> dict[str, str]:
    text = f"MemTotal:       {total_bytes >> 10} kB\nMemFree:  1 kB\nMemAvailable:   {available_bytes >> 10} kB\n"
    return {"proc/meminfo": text}


def cores(*siblings: str) -> dict[str, str]:
    """Topology of as many logical CPUs, each with the list of its siblings."""
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"{text}\n" for cpu, text in enumerate(siblings)
    }
    return files | {"sys/devices/system/cpu/online": f"0-{len(siblings) - 1}\n"}


def affinity(cpus: str) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n"}


# --- devices ---------------------------------------------------------------------------------------------------------


def test_device_descriptions_may_hold_parentheses_and_commas() -> None:
    text = (
        "Available devices:\n"
        "  Vulkan0: llvmpipe (LLVM 21.1.8, 256 bits) (24105 MiB, 23798 MiB free)\n"
        "  CUDA0: NVIDIA GeForce RTX 3060 (12036 MiB, 11814 MiB free)\r\n"
    )
    assert parse_device_list(text) == (
        Device("Vulkan0", "llvmpipe (LLVM 21.1.8, 256 bits)", 24105 * MIB, 23798 * MIB),
        Device("CUDA0", "NVIDIA GeForce RTX 3060", 12036 * MIB, 11814 * MIB),
    )


@pytest.mark.parametrize("text", ["", "Available devices:\n  (none)\n", "  CUDA0: broken (x MiB, 1 MiB free)\n"])
def test_no_devices(text: str) -> None:
    assert parse_device_list(text) == ()


def test_the_native_engine_lists_what_we_read(tmp_path: Path) -> None:
    line = "  Vulkan0: AMD Radeon RX 7600 (RADV NAVI33) (8176 MiB, 8176 MiB free)\n"
    card = "sys/class/drm/card1/device/"
    root = lay_out(
        tmp_path,
        {card + "mem_info_vram_total": f"{8176 * MIB}\n", card + "mem_info_vram_used": f"{1000 * MIB}\n"}
        | meminfo(32 * GIB, 20 * GIB)
        | cores("0", "1")
        | affinity("0-1"),
    )
    machine = probe_machine("Available devices:\n" + line, root=root)
    # The engine's Vulkan driver reports everything as free; the kernel knows better.
    assert [(device.name, device.free_bytes) for device in machine.devices] == [("Vulkan0", 7176 * MIB)]
    assert (machine.ram_total_bytes, machine.ram_available_bytes, machine.threads) == (32 * GIB, 20 * GIB, 2)
    assert device_memory(root=root) == (DeviceMemory("amdgpu card1", 8176 * MIB, 1000 * MIB, 7176 * MIB),)


def test_each_driver_reading_is_used_once_and_only_lowers() -> None:
    twins = tuple(Device(f"CUDA{i}", "NVIDIA GeForce RTX 3060", 12036 * MIB, 11000 * MIB) for i in range(2))
    names = (*(f"NVIDIA GeForce RTX 3060 @ 0000:0{number}:00.0" for number in (1, 2)), "NVIDIA GeForce RTX 4090")
    readings = [
        DeviceMemory(names[0], 12288 * MIB, 2288 * MIB, 10000 * MIB),
        DeviceMemory(names[1], 12288 * MIB, 88 * MIB, 12200 * MIB),
        DeviceMemory(names[2], 24564 * MIB, 0, 1 * MIB),
    ]
    assert [device.free_bytes // MIB for device in with_driver_memory(twins, readings)] == [10000, 11000]


def test_equal_cards_have_names_of_their_own(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, _TWO_CARDS], check=True)
    program = "from app.hardware import *; print([*device_memory()], process_device_memory())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    names = ("Twin Card @ 0000:01:00.0", "Twin Card @ 0000:02:00.0", "Other Card")
    cards = [
        DeviceMemory(name, 8192 * MIB, 100 * number * MIB, (8192 - 100 * number) * MIB)
        for number, name in enumerate(names, start=1)
    ]
    held = {7: dict(zip(names, (3 * MIB, 13 * MIB, 3 * MIB), strict=True))}
    assert done.stdout.rstrip() == f"{cards} {held}"


def test_this_machine_can_be_probed() -> None:
    machine = probe_machine("")
    assert 0 < machine.ram_available_bytes <= machine.ram_total_bytes
    assert machine.threads >= 1
    assert all(reading.total_bytes >= reading.free_bytes for reading in device_memory())


# --- RAM -------------------------------------------------------------------------------------------------------------


def test_without_limits_the_system_counts(tmp_path: Path) -> None:
    root = lay_out(tmp_path, meminfo(32 * GIB, 30 * GIB) | {"proc/self/cgroup": "0::/user.slice\n"})
    (root / "sys/fs/cgroup/user.slice").mkdir(parents=True)
    lay_out(root, {"sys/fs/cgroup/user.slice/memory.max": "max\n"})
    assert ram_bytes(root=root) == (32 * GIB, 30 * GIB)


def test_version_2_takes_the_least_over_all_ancestors(tmp_path: Path) -> None:
    outer, inner = "sys/fs/cgroup/system.slice/", "sys/fs/cgroup/system.slice/gateway.service/"
    root = lay_out(
        tmp_path,
        meminfo(64 * GIB, 60 * GIB)
        | {
            "proc/self/cgroup": "0::/system.slice/gateway.service\n",
            outer + "memory.max": f"{10 * GIB}\n",
            outer + "memory.current": f"{9 * GIB}\n",
            outer + "memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable {GIB}\n",
            inner + "memory.max": f"{16 * GIB}\n",
            inner + "memory.current": f"{GIB}\n",
        },
    )
    # The outer group: 9 GiB in use, 3 of them droppable, so 4 of 10 are left.
    assert ram_bytes(root=root) == (10 * GIB, 4 * GIB)
    # The soft limit throttles: it is as much a limit for us.
    lay_out(root, {inner + "memory.high": f"{3 * GIB}\n"})
    assert ram_bytes(root=root) == (3 * GIB, 2 * GIB)


def test_a_container_with_its_own_namespace(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
    }
    root = lay_out(tmp_path, meminfo(64 * GIB, 60 * GIB) | files)
    assert ram_bytes(root=root) == (2 * GIB, 0)


def test_version_1_inside_a_container_that_shows_the_hosts_path(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x\n",
        base + "memory.limit_in_bytes": f"{6 * GIB}\n",
        base + "memory.usage_in_bytes": f"{5 * GIB}\n",
        base + "memory.stat": f"cache 9\ninactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
    }
    root = lay_out(tmp_path, meminfo(64 * GIB, 60 * GIB) | files)
    assert ram_bytes(root=root) == (6 * GIB, 3 * GIB)


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/a/b\n",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "0\n",
    }
    root = lay_out(tmp_path, meminfo(64 * GIB, 60 * GIB) | files)
    assert ram_bytes(root=root) == (8 * GIB, 8 * GIB)


@pytest.mark.parametrize("text", ["", "\n", "nonsense\n", "0::\n", "0::/../../etc\n"])
def test_a_strange_cgroup_file_does_no_harm(tmp_path: Path, text: str) -> None:
    root = lay_out(tmp_path, meminfo(8 * GIB, 4 * GIB) | {"proc/self/cgroup": text})
    assert ram_bytes(root=root) == (8 * GIB, 4 * GIB)


# --- cores -----------------------------------------------------------------------------------------------------------


def test_siblings_count_once_and_only_those_we_may_use(tmp_path: Path) -> None:
    topology = cores("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")
    assert usable_threads(root=lay_out(tmp_path, topology | affinity("0-7"))) == 4
    assert usable_threads(root=lay_out(tmp_path, affinity("0,4-5"))) == 2


def test_hybrids_use_their_performance_cores(tmp_path: Path) -> None:
    topology = cores("0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7") | {"sys/devices/cpu_core/cpus": "0-3\n"}
    assert usable_threads(root=lay_out(tmp_path, topology | affinity("0-7"))) == 2
    # Bound to efficiency cores only: then those are what there is.
    assert usable_threads(root=lay_out(tmp_path, affinity("4-7"))) == 4


def test_arm_states_how_fast_each_core_is(tmp_path: Path) -> None:
    capacity = {
        f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": f"{value}\n"
        for cpu, value in enumerate((381, 381, 381, 381, 870, 870, 1024, 1024))
    }
    topology = cores(*map(str, range(8)))
    assert usable_threads(root=lay_out(tmp_path, topology | capacity | affinity("0-7"))) == 4


@pytest.mark.parametrize(("quota", "threads"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
def test_the_quota_of_version_2_is_rounded_down(tmp_path: Path, quota: str, threads: int) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": quota + "\n"}
    (tmp_path / "sys/fs/cgroup/a/b").mkdir(parents=True)
    root = lay_out(tmp_path, cores("0", "1", "2", "3") | affinity("0-3") | files)
    assert usable_threads(root=root) == threads


@pytest.mark.parametrize(("quota", "threads"), [("300000", 3), ("-1", 4)])
def test_the_quota_of_version_1(tmp_path: Path, quota: str, threads: int) -> None:
    base = "sys/fs/cgroup/cpu,cpuacct/"
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/\n",
        base + "cpu.cfs_quota_us": quota + "\n",
        base + "cpu.cfs_period_us": "100000\n",
    }
    root = lay_out(tmp_path, cores("0", "1", "2", "3") | affinity("0-3") | files)
    assert usable_threads(root=root) == threads


def test_who_holds_a_device_is_named_and_we_are_not() -> None:
    held = {1: {"card": 200 << 20}, os.getpid(): {"card": 1900 << 20, "other": 100 << 20}, 4_000_000: {"card": 5 << 20}}
    named = largest_holders(held, without={1})
    assert re.fullmatch(rf"\S+ \(pid {os.getpid()}, 2,000 MiB\), a program \(pid 4000000, 5 MiB\)", named)
    assert largest_holders({}, without=()) == ""
