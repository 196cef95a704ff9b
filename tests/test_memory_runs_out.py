"""Real engines that really run out of memory, of a card's and of the system's, and come up smaller."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.binary import EngineBinary, find_engine
from app.hardware import parse_device_list
from app.memory import KVType
from tests import shapes
from tests.fleet import Fleet, fleet_of
from tests.gguf_writer import write

MIB = 1 << 20
_SMALL_CARD = Path(__file__).with_name("small_card.c")


@pytest.fixture(scope="module")
def engine(native_engine: Path | None) -> EngineBinary:
    if native_engine is None:
        pytest.skip("no native engine")
    return find_engine(str(native_engine))


@pytest.fixture
def small_card(engine: EngineBinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A software device that says it is as large as the RAM and has room for 265 MiB."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to make the device small with")
    library = tmp_path / "small_card.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, _SMALL_CARD, "-ldl"], check=True)
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    if not parse_device_list(engine.device_list()):
        pytest.skip("the native engine sees no device, not even a software one")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("SMALL_CARD_MIB", "265")
    return 265


@pytest.mark.slow
async def test_a_full_card_gets_the_model_on_the_third_try(
    engine: EngineBinary, small_card: int, tmp_path: Path
) -> None:
    """All of it takes 310 MiB, 303 with smaller ubatches, 228 with the experts of two layers in RAM."""
    shape = shapes.small_mixture()
    model = write(tmp_path / "mixture.gguf", shape, words=True)
    # The engine's trial run would compile every kernel for the CPU that plays the device.
    entry = {"kv_cache": "f16", "extra_args": ["--no-warmup"]}
    async with fleet_of(engine, model, {"a": entry}) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert [step.setting for step in backend.plan.steps] == ["ubatch", "cpu_moe_layers"]
        assert (backend.plan.placement.ubatch, backend.plan.placement.cpu_moe_layers) == (256, 2)
        assert fleet.count("plan_step_downs_total", model="a") == 2
        assert fleet.supervisor.status(fleet.model("a")).deaths == 0
        # Each smaller plan had the engine's word before it was tried, and what was loaded is as planned.
        assert backend.plan.verified is not None
        (measured,) = backend.measured.device_bytes().values()
        assert measured <= small_card * MIB
        assert measured == pytest.approx(backend.plan.memory.devices[0].total_bytes, rel=0.06)
        assert fleet.supervisor.status(fleet.model("a")).plan is backend.plan


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 165 MiB."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    group = Path("/sys/fs/cgroup/memory") / (own or "").lstrip("/") / f"lg-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(165 * MIB))
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    yield group
    group.rmdir()


def confined(engine: EngineBinary, group: Path, folder: Path) -> EngineBinary:
    """``engine``, which has only so much RAM when it is to serve: no plan can know that."""
    program = folder / "llama-server"
    enter = f"echo $$ >{group}/cgroup.procs"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *"--alias probe"*) ;; *--alias*) {enter};; esac\nexec {engine.path} "$@"\n'
    )
    program.chmod(0o755)
    return replace(engine, command=(str(program),), path=program)


def answers(fleet: Fleet, pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists() and fleet.state("a") == "ready"


@pytest.mark.slow
async def test_killed_by_the_kernel_at_load_it_comes_up_with_a_smaller_cache(
    engine: EngineBinary, demo_model: Path, tmp_path: Path, small_group: Path
) -> None:
    """8192 tokens in f16 take 207 MiB of RAM in all, in q8_0 123."""
    assert "GGML_VK_VISIBLE_DEVICES" not in os.environ
    entry = {"context": 8192, "offload": {"gpu_layers": 0}}
    async with fleet_of(confined(engine, small_group, tmp_path), demo_model, {"a": entry}) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert backend.plan.placement.kv_cache_k is KVType.Q8_0
        (step,) = backend.plan.steps
        assert step.because == "step 1 of at most 6 down from f16: with that the system ran out of RAM while it loaded"
        assert fleet.count("plan_step_downs_total", model="a") == 1
        assert await backend.count_chat(b'{"messages": [{"role": "user", "content": "hi"}]}') > 1
        assert answers(fleet, backend.process.pid)
