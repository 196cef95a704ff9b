"""Reports of people whose models were planned or loaded wrongly, one test a row (the numbers are those of the list).

Other rows of this kind have their tests where they belong: 5 in test_landing, 21 in test_memory, 22, 23 and 59 in
test_supervisor_causes and test_engine_binary, 26 in test_supervisor_memory and test_eviction, 43 in test_gguf.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from app.backends.liveness import Patience
from app.engine.accounting import AccountingReport, ask_accounting
from app.engine.binary import EngineBinary, find_engine
from app.engine.command import Endpoint, build_argv
from app.engine.environment import child_environment
from app.engine.flags import check_extra_args
from app.errors import ConfigError
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine
from app.memory import KVType, MemoryModel
from app.offload import OffloadPlan, Wish, plan_offload
from tests import projector_shapes, shapes
from tests.fleet import fake_engine_binary, fleet_of
from tests.gguf_writer import U32, Shape, write
from tests.test_supervisor_causes import dying

MIB = 1 << 20
GIB = 1 << 30

Written = Callable[[Shape], ModelFacts]


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return lambda shape: read_header(write(tmp_path / "model.gguf", shape))


def machine(free_mib: int, *, name: str = "CUDA0", ram_gib: int = 30) -> Machine:
    device = Device(name, "a card", (free_mib + 600) * MIB, free_mib * MIB)
    return Machine((device,), (ram_gib + 2) * GIB, ram_gib * GIB, threads=4)


def argv_of(plan: OffloadPlan, engine: EngineBinary) -> tuple[str, ...]:
    return build_argv(plan, engine, alias="a", endpoint=Endpoint(port=1), key_file=None)


def value_of(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def doomed(pid: int) -> int:
    """How gladly the kernel ends a process when memory runs out."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_row_2_the_context_is_that_of_a_request_and_as_large_as_the_engine_says(
    fake: EngineBinary, demo_model: Path
) -> None:
    async with fleet_of(fake, demo_model, {"a": {"context": 128, "parallel": 4}}) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        argv = backend.process.spec.argv
        assert (value_of(argv, "--ctx-size"), value_of(argv, "--parallel")) == ("512", "4")
        # The engine rounds each slot up to 256, so that dividing would be wrong too.
        status = fleet.supervisor.status(fleet.model("a"))
        assert (status.context_tokens, status.slots) == (256, 4)
        assert backend.counter.context_tokens == 256


async def test_row_6_a_slow_load_is_given_time_as_long_as_something_happens(
    fake: EngineBinary, demo_model: Path, tmp_path: Path
) -> None:
    slowly = "for step in 1 2 3 4 5 6; do echo loading $step >&2; sleep 0.25; done"
    engine = dying(fake, tmp_path, says="loading model", then=slowly)
    async with fleet_of(engine, demo_model, {"a": {}}, patience=Patience(stall_seconds=1.0)) as fleet:
        began = time.monotonic()
        await fleet.supervisor.ready(fleet.model("a"))
        assert time.monotonic() - began > 1.3
        assert fleet.supervisor.status(fleet.model("a")).deaths == 0


async def test_row_6_a_list_of_models_that_comes_early_is_no_readiness(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}) as fleet:
        fleet.switch("a", models_ready_early=True, load_seconds=0.8)
        asking = asyncio.create_task(fleet.supervisor.ready(fleet.model("a")))
        async with asyncio.timeout(10):
            while not fleet.starts():
                await asyncio.sleep(0.01)
        began = time.monotonic()
        backend = await asking
        assert time.monotonic() - began > 0.5
        assert (await backend.busy_slots()) == 0


def test_row_19_all_experts_need_memory_and_every_layer_has_its_own_heads(written: Written) -> None:
    shape = shapes.mixture(layers=48, embedding=2048, heads=32, kv_heads=4, head_length=128, experts=128, used=8)
    kv_heads = [4 if layer % 2 else 2 for layer in range(48)]
    keys = {**shape.keys, "attention.head_count_kv": kv_heads}
    facts = written(replace(shape, keys=keys))
    plan = plan_offload(facts, machine(8000), Wish(context=8192, kv_cache="f16"))
    experts = sum(tensor.size_bytes for tensor in facts.tensors if "_exps" in tensor.name)
    device, host = plan.memory.devices[0], plan.memory.host
    assert device.experts_bytes + host.experts_bytes == experts
    # The key length of the file, not 2048 / 32, and the mean of three heads.
    assert device.kv_cache_bytes + host.kv_cache_bytes == 2 * 2 * 8192 * 128 * sum(kv_heads)
    assert device.compute_bytes > 0
    assert device.total_bytes <= (8000 - 512) * MIB


def test_row_20_the_engine_never_places_anything_itself(fake: EngineBinary, written: Written, tmp_path: Path) -> None:
    projector = read_header(write(tmp_path / "mmproj.gguf", projector_shapes.siglip()))
    facts = written(shapes.mixture(layers=24))
    for wish in (Wish(), Wish(gpu_layers=10), Wish(cpu_moe_layers=20)):
        plan = plan_offload(facts, machine(6000), wish, mmproj=projector)
        argv = argv_of(plan, fake)
        assert value_of(argv, "--fit") == "off"
        assert int(value_of(argv, "--n-gpu-layers")) == plan.placement.gpu_layers
        # The first picture finds its memory counted.
        where = plan.memory.devices[0].mmproj_bytes if plan.placement.mmproj_on == "CUDA0" else 0
        assert where or plan.placement.mmproj_on == "host"
        assert "--mmproj" in argv
    for flag in (["--fit", "on"], ["--n-gpu-layers", "9"], ["--n-cpu-moe", "4"], ["--override-tensor", "a=CPU"]):
        with pytest.raises(ConfigError):
            check_extra_args(flag)
    # An engine that gives up fitting has confirmed nothing.
    report = AccountingReport("llama-server")
    report.feed(
        "W common_fit_params: failed to fit params to free device memory: n_gpu_layers already set by user, abort"
    )
    assert report.accounting() is None
    assert "already set by user" in report.excuse()


async def test_row_24_the_engine_is_ended_before_the_gateway_and_has_a_cache_within_the_budget(
    fake: EngineBinary, demo_model: Path
) -> None:
    memory = {"ram_limit": "1300MiB"}
    async with fleet_of(fake, demo_model, {"a": {}}, memory=memory) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert backend.process.pid is not None
        assert doomed(backend.process.pid) > doomed(os.getpid())
        # Without the flag the engine takes up to 8 GiB.
        cache_mib = int(value_of(backend.process.spec.argv, "--cache-ram"))
        assert 0 < cache_mib < 700


def test_row_45_a_quantised_v_needs_flash_attention(
    native_engine: Path | None, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = written(
        shapes.dense(
            layers=4, embedding=2560, heads=16, kv_heads=16, head_length=160, feed_forward=6912, vocabulary=9000
        )
    )
    plan = plan_offload(facts, machine(2000, name="Vulkan0"), Wish(context=8192, kv_cache="q8_0"))
    placement = plan.placement
    assert placement.gpu_layers == 5
    assert not placement.flash_attention
    assert (placement.kv_cache_k, placement.kv_cache_v) == (KVType.Q8_0, KVType.F16)
    told = {reason.setting: reason.because for reason in plan.reasons}
    assert "needs flash attention" in told["kv_cache_v"]
    row = 8192 * 16 * 160
    assert MemoryModel(facts).kv_bytes(placement, range(4)) == 4 * (row * 34 // 32 + 2 * row)
    if native_engine is None:
        pytest.skip("no native engine to ask")
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    engine, environment = find_engine(str(native_engine)), child_environment(os.environ)
    assert ask_accounting(plan, engine, environment=environment).accounting is not None
    both = replace(plan, placement=replace(placement, kv_cache_v=KVType.Q8_0))
    assert ask_accounting(both, engine, environment=environment).accounting is None


def test_row_60_a_context_that_nobody_asked_for_is_not_the_largest(fake: EngineBinary, written: Written) -> None:
    facts = written(shapes.qwen35moe(layers=8, experts=32))
    assert facts.context_trained == 262144
    argv = argv_of(plan_offload(facts, machine(7600), Wish()), fake)
    assert value_of(argv, "--ctx-size") == "8192"
    short = replace(facts, metadata={**facts.metadata, "qwen35moe.context_length": U32(2048)})
    assert value_of(argv_of(plan_offload(short, machine(7600), Wish()), fake), "--ctx-size") == "2048"
