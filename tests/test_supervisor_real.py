"""Two real models on a real engine, by turns, under a memory limit that holds only one of them."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway import running_gateway

GIB = 1 << 30


class MemoryGroup:
    """A control group of either version."""

    def __init__(self, folder: Path, *, is_v2: bool) -> None:
        self.folder = folder
        self._limit = folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")
        self._events = folder / ("memory.events" if is_v2 else "memory.oom_control")

    def open(self, limit_bytes: int) -> None:
        self.folder.mkdir()
        self._limit.write_text(str(limit_bytes))

    def kills(self) -> int:
        words = self._events.read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


@pytest.fixture
def one_gibibyte() -> Iterator[MemoryGroup]:
    name = f"lg-{uuid.uuid4().hex[:8]}"
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    root = Path("/sys/fs/cgroup")
    if first is not None:
        group = MemoryGroup(root / "memory" / first.lstrip("/") / name, is_v2=False)
    else:
        group = MemoryGroup(root / name, is_v2=True)
    try:
        group.open(GIB)
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    yield group
    group.folder.rmdir()


@pytest.mark.slow
def test_both_by_turns_within_one_gibibyte(
    native_engine: Path | None, demo_model: Path, tmp_path: Path, one_gibibyte: MemoryGroup
) -> None:
    if native_engine is None:
        pytest.skip("no native llama-server on this machine; deploy/native-engine-debian.sh installs one")
    second = tmp_path / "second.gguf"
    second.write_bytes(demo_model.read_bytes())
    config = {
        "engine": {"binary": str(native_engine)},
        "memory": {"ram_reserve": "64MiB", "min_residency": "1s"},
        "models": {
            "first": {"path": str(demo_model), "context": 2048},
            "second": {"path": str(second), "context": 2048},
        },
    }
    with running_gateway(config, tmp_path) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as client:
        # From here on everything that it starts is in the group too.
        (one_gibibyte.folder / "cgroup.procs").write_text(str(gateway.pid))
        for turn in range(6):
            name = ("first", "second")[turn % 2]
            body = {"model": name, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 8}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            states = {model["id"]: model["state"] for model in client.get("/admin/models").json()["data"]}
            assert states == {"first": "stopped", "second": "stopped"} | {name: "ready"}
            assert len(gateway.engine_pids()) == 1
        metrics = client.get("/metrics").text
        assert one_gibibyte.kills() == 0
    evictions = [line for line in metrics.splitlines() if line.startswith("llama_gateway_evictions_total")]
    assert sum(float(line.split()[-1]) for line in evictions) == 5
    assert subprocess.run(["cat", one_gibibyte.folder / "cgroup.procs"], capture_output=True).stdout == b""
