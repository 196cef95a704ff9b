"""Planned against actual: a model that landed elsewhere is degraded, says why, or is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.engine.binary import EngineBinary, find_engine
from app.engine.landing import degradation
from app.engine.report import BufferKind, MeasuredBuffer, MeasuredMemory, MemoryReport
from app.errors import ModelFailed
from app.events import EventKind, EventLog
from app.gguf import read_header
from app.hardware import Device, Machine, probe_machine
from app.offload import OffloadPlan, Wish, plan_offload
from app.supervisor.restarts import RestartPolicy, RestartRules
from tests.fleet import Fleet, fake_binary, fake_engine_binary, fleet_of
from tests.gateway import running_gateway

MIB = 1 << 20
GIB = 1 << 30
CARD = Machine((Device("CUDA0", "a card", 8 * GIB, 7 * GIB),), 18 * GIB, 16 * GIB, threads=2)
NO_CUDA = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"


@pytest.fixture(scope="module")
def plan(demo_model: Path) -> OffloadPlan:
    return plan_offload(read_header(demo_model), CARD, Wish(context=512))


def weights(device: str, size_bytes: int) -> tuple[MeasuredBuffer, ...]:
    return (MeasuredBuffer(device, BufferKind.MODEL, size_bytes),)


# --- the judgement ------------------------------------------------------------------------------------------------


def test_what_landed_as_planned_is_not_degraded(plan: OffloadPlan) -> None:
    assert plan.placement.gpu_layers == 31
    planned = plan.memory.devices[0].weights_bytes
    whole = MeasuredMemory(weights("CUDA0", planned), layers_offloaded=31, layers_total=31)
    assert degradation(plan, whole) is None
    # An engine that logs nothing is believed.
    assert degradation(plan, MeasuredMemory()) is None


def test_layers_on_the_cpu_are_told_with_the_engines_own_words(plan: OffloadPlan) -> None:
    report = MemoryReport()
    report.feed([NO_CUDA, "load_tensors: offloaded 0/31 layers to GPU"])
    found = degradation(plan, report.measured())
    assert found is not None
    assert not found.on_device
    assert found.reason.startswith("It runs on the CPU: none of the 31 layers")
    assert f"The engine said: {NO_CUDA}." in found.reason
    assert "doctor" in found.reason


def test_some_layers_missing_is_degraded_but_on_the_device(plan: OffloadPlan) -> None:
    found = degradation(plan, MeasuredMemory(layers_offloaded=20, layers_total=31))
    assert found is not None
    assert found.on_device
    assert found.reason.startswith("Only 20 of 31 planned layers")


def test_tensors_that_stayed_in_ram_although_the_layers_are_counted(plan: OffloadPlan) -> None:
    measured = MeasuredMemory(weights("CPU_Mapped", 92 * MIB), layers_offloaded=31, layers_total=31)
    found = degradation(plan, measured)
    assert found is not None
    assert not found.on_device
    assert found.reason.startswith("Only 0 MiB of")


def test_an_engine_built_for_cpus_on_a_machine_with_a_card(demo_model: Path) -> None:
    blind = Machine((), 18 * GIB, 16 * GIB, 2, unseen_devices=("NVIDIA GeForce RTX 3060",))
    facts = read_header(demo_model)
    found = degradation(plan_offload(facts, blind, Wish(context=512)), MeasuredMemory())
    assert found is not None
    assert "although this machine has NVIDIA GeForce RTX 3060" in found.reason
    # Who wants the CPU has it.
    assert degradation(plan_offload(facts, blind, Wish(context=512, gpu_layers=0)), MeasuredMemory()) is None
    assert degradation(plan_offload(facts, replace(blind, unseen_devices=()), Wish()), MeasuredMemory()) is None


def test_a_card_that_the_engine_does_not_list_is_seen_by_its_driver(tmp_path: Path) -> None:
    for name, total_bytes in (("card0", 512 * MIB), ("card1", 8 * GIB)):
        device = tmp_path / f"sys/class/drm/{name}/device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{total_bytes}\n")
        (device / "mem_info_vram_used").write_text("0\n")
    # What a processor's own graphics keeps is no card.
    assert probe_machine("", root=tmp_path).unseen_devices == ("amdgpu card1",)
    listed = "Available devices:\n  Vulkan0: AMD Radeon (8192 MiB, 8000 MiB free)\n"
    assert probe_machine(listed, root=tmp_path).unseen_devices == ()


# --- a gateway ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


async def load(fleet: Fleet) -> None:
    fleet.switch("a", offloaded="0/31")
    await fleet.supervisor.ready(fleet.model("a"))


async def test_a_degraded_model_serves_and_says_so(fake: EngineBinary, demo_model: Path) -> None:
    events = EventLog()
    async with fleet_of(fake, demo_model, {"a": {}}, probe=lambda: CARD, events=events) as fleet:
        await load(fleet)
        assert fleet.state("a") == "ready"
        assert fleet.count("model_degraded", model="a") == 1
        assert fleet.count("offloaded_layers", model="a", kind="planned") == 31
        assert fleet.count("offloaded_layers", model="a", kind="actual") == 0
        plan = fleet.supervisor.status(fleet.model("a")).plan
        assert plan is not None
        assert NO_CUDA in (plan.degraded or "")
        assert plan.reasons[-1].setting == "degraded"
        (event,) = [each for each in events.latest(10) if each.kind is EventKind.DEGRADED]
        assert "slower" in event.message
        assert NO_CUDA in (event.detail or "")
        # Repaired, and loaded again.
        fleet.supervisor.unload(fleet.model("a"))
        async with asyncio.timeout(10):
            while fleet.state("a") != "stopped":
                await asyncio.sleep(0.01)
        fleet.switch("a", offloaded="31/31")
        await fleet.supervisor.ready(fleet.model("a"))
        assert fleet.count("model_degraded", model="a") == 0


async def test_require_gpu_refuses_what_landed_on_the_cpu(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {"require_gpu": True}}, probe=lambda: CARD) as fleet:
        with pytest.raises(ModelFailed, match="it must run on a GPU") as refusal:
            await load(fleet)
        assert fleet.starts() == ["a"]
        # Another load would end the same way, so that it is left alone for long.
        assert (refusal.value.retry_after_seconds or 0) > 200
        failure = fleet.supervisor.status(fleet.model("a")).failure
        assert failure is not None
        assert "has require_gpu and is not served: It runs on the CPU" in failure.reason
        assert NO_CUDA in failure.reason
        assert fleet.supervisor.status(fleet.model("a")).pid is None


async def test_require_gpu_without_any_device_starts_nothing(fake: EngineBinary, demo_model: Path) -> None:
    blind = Machine((), 18 * GIB, 16 * GIB, 2, unseen_devices=("NVIDIA GeForce RTX 3060",))
    async with fleet_of(fake, demo_model, {"a": {"require_gpu": True}}, probe=lambda: blind) as fleet:
        with pytest.raises(ModelFailed, match="it must run on a GPU"):
            await fleet.supervisor.ready(fleet.model("a"))
        failure = fleet.supervisor.status(fleet.model("a")).failure
        assert failure is not None
        assert "sees none although this machine has NVIDIA GeForce RTX 3060" in failure.reason
        assert fleet.starts() == []


@pytest.mark.slow
async def test_a_driver_that_goes_between_plan_and_load_costs_one_restart(
    native_engine: Path | None, demo_model: Path
) -> None:
    """Slow: the next plan waits ten seconds for what the device may give back."""
    if native_engine is None:
        pytest.skip("no native engine")
    blind = Machine((), 18 * GIB, 16 * GIB, 2, unseen_devices=("NVIDIA GeForce RTX 3060",))

    def probe() -> Machine:
        # The engine has never heard of this card.
        return CARD if fleet.supervisor.status(fleet.model("a")).deaths == 0 else blind

    engine = find_engine(str(native_engine))
    quick = RestartRules(first_delay=0.01)
    options: dict[str, Any] = {"probe": probe, "new_policy": lambda: RestartPolicy(quick)}
    async with fleet_of(engine, demo_model, {"a": {}}, **options) as fleet:
        await fleet.supervisor.ready(fleet.model("a"))
        assert fleet.count("engine_restarts_total", model="a", cause="device_gone") == 1
        plan = fleet.supervisor.status(fleet.model("a")).plan
        assert plan is not None
        assert plan.placement.gpu_layers == 0
        assert "although this machine has NVIDIA GeForce RTX 3060" in (plan.degraded or "")


@pytest.mark.slow
def test_row_5_everything_quietly_on_the_cpu_is_shown_over_http(demo_model: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "engine": {"binary": str(fake_binary(tmp_path))},
        "models": {"a": {"path": str(demo_model), "context": 512, "preload": True}},
    }
    environment = {
        "FAKE_DEVICES": "CUDA0: NVIDIA GeForce RTX 3060 (8192 MiB, 7600 MiB free)",
        "FAKE_ENGINE": json.dumps({"offloaded": "0/33"}),
    }
    with running_gateway(config, tmp_path, environment=environment) as gateway:

        def get(path: str) -> httpx.Response:
            return httpx.get(gateway.url + path)

        body = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30).status_code == 200
        assert get("/v1/models/a").json()["state"] == "ready"
        assert NO_CUDA in get("/admin/models/a").json()["degraded"]
        reasons = get("/admin/models/a/plan").json()["reasons"]
        assert NO_CUDA in next(reason["because"] for reason in reasons if reason["setting"] == "degraded")
        metrics = get("/metrics").text
        assert 'llama_gateway_model_degraded{model="a"} 1.0' in metrics
        assert 'llama_gateway_offloaded_layers{kind="actual",model="a"} 0.0' in metrics
        assert 'llama_gateway_offloaded_layers{kind="planned",model="a"} 31.0' in metrics
