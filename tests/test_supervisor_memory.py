"""An engine that runs out of memory comes up by a smaller plan: tries counted, told, and bounded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from app.backends import LocalBackend
from app.config import ModelCatalog, ModelConfig
from app.engine.binary import EngineBinary
from app.engine.process import EngineDied
from app.engine.report import Cause
from app.errors import ModelFailed
from app.events import EventKind, EventLog
from app.hardware import Device, Machine
from app.metrics import Metrics
from app.offload import OffloadPlan
from app.supervisor import Supervisor
from app.supervisor.restarts import RestartPolicy, RestartRules
from tests import shapes
from tests.fleet import Fleet, fake_binary, fake_engine_binary, fleet_of, settings_for
from tests.gateway import running_gateway
from tests.gguf_writer import write
from tests.test_fleet_machine import Loop, SimulatedEngine, World

MIB = 1 << 20
GIB = 1 << 30

# On a card with 480 MiB free: everything but the experts of four layers, in ubatches of 512.
MODEL: Mapping[str, Any] = {"kv_cache": "f16", "context": 4096}
FREE_MIB = 480


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = shapes.mixture(layers=12, embedding=1024, experts=32, expert_feed_forward=512, vocabulary=32000)
    return write(tmp_path_factory.mktemp("models") / "mixture.gguf", shape, words=True)


class Card:
    """A machine with one card, whose free memory a test may change."""

    def __init__(self, free_mib: int) -> None:
        self.free_mib = free_mib

    def __call__(self) -> Machine:
        device = Device("CUDA0", "a card", 8000 * MIB, self.free_mib * MIB)
        return Machine((device,), 18 * GIB, 16 * GIB, threads=2)


def quick() -> RestartPolicy:
    return RestartPolicy(RestartRules(first_delay=0.01, longest_delay=0.02))


def options(card: Card, events: EventLog | None = None) -> Mapping[str, Any]:
    return {"probe": card, "new_policy": quick, "memory": {"vram_reserve": 0}, "events": events or EventLog()}


def placement_of(fleet: Fleet) -> tuple[int, int, int]:
    """Layers on the card, layers with experts in RAM, and the ubatch that its engine runs by."""
    plan = fleet.supervisor.status(fleet.model("a")).plan
    assert plan is not None
    return plan.placement.gpu_layers, plan.placement.cpu_moe_layers, plan.placement.ubatch


async def test_a_load_that_runs_out_of_device_memory_comes_up_on_the_third_try(
    fake: EngineBinary, mixture: Path
) -> None:
    events = EventLog()
    async with fleet_of(fake, mixture, {"a": MODEL}, **options(Card(FREE_MIB), events)) as fleet:
        planned = await fleet.supervisor.plan(fleet.model("a"))
        assert (planned.placement.ubatch, planned.placement.cpu_moe_layers) == (512, 4)
        fleet.switch("a", no_memory_for=["--ubatch-size 512", "--n-cpu-moe 4"])
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert fleet.starts() == ["a"] * 3
        assert placement_of(fleet) == (13, 6, 256)
        assert backend.plan is fleet.supervisor.status(fleet.model("a")).plan
        assert fleet.count("plan_step_downs_total", model="a") == 2
        # No restart: the engine had not served yet.
        assert fleet.count("engine_restarts_total", model="a", cause="out_of_device_memory") == 0
        assert fleet.supervisor.status(fleet.model("a")).deaths == 0
        told = [event for event in events.latest(10) if event.kind is EventKind.STEP_DOWN]
        assert [event.message.rpartition(". ")[2] for event in told] == [
            "Now with ubatch 256 (step 1 of at most 6).",
            "Now with cpu_moe_layers 6 (step 2 of at most 6).",
        ]
        shown = {reason.setting: reason for reason in backend.plan.reasons}
        assert shown["ubatch"].because.startswith("step 1 of at most 6 down from 512")
        assert shown["cpu_moe_layers"].because.startswith("step 2 of at most 6 down from 4")
        planned_bytes = fleet.count("model_memory_planned_bytes", model="a", device="CUDA0", part="compute")
        assert 0 < planned_bytes == backend.plan.memory.devices[0].compute_bytes


async def test_after_six_smaller_plans_it_is_given_up_at_once(fake: EngineBinary, mixture: Path) -> None:
    async with fleet_of(fake, mixture, {"a": MODEL}, **options(Card(FREE_MIB))) as fleet:
        fleet.switch("a", no_memory_for=["--device CUDA0"])
        with pytest.raises(ModelFailed, match="The device ran out of memory"):
            await fleet.supervisor.ready(fleet.model("a"))
        assert fleet.starts() == ["a"] * 7
        assert fleet.count("plan_step_downs_total", model="a") == 6
        status = fleet.supervisor.status(fleet.model("a"))
        assert status.failure is not None
        assert status.failure.cause is Cause.OUT_OF_DEVICE_MEMORY
        # Nothing is held by it any more, and nobody else's plan counts it.
        assert status.plan is None
        assert status.deaths == 1
        # An operator's word begins from the top.
        fleet.switch("a")
        fleet.supervisor.load(fleet.model("a"))
        await fleet.supervisor.ready(fleet.model("a"))
        assert placement_of(fleet) == (13, 4, 512)


async def test_what_the_operator_fixed_is_not_lowered(fake: EngineBinary, mixture: Path) -> None:
    entry = {**MODEL, "offload": {"cpu_moe_layers": 6}}
    async with fleet_of(fake, mixture, {"a": entry}, **options(Card(FREE_MIB))) as fleet:
        fleet.switch("a", no_memory_for=["--device CUDA0"])
        with pytest.raises(ModelFailed, match="ran out of memory"):
            await fleet.supervisor.ready(fleet.model("a"))
        # Only the ubatch was left to lower, from 1024.
        assert fleet.starts() == ["a"] * 3
        assert fleet.count("plan_step_downs_total", model="a") == 2


async def test_half_of_the_context_only_where_that_is_allowed(fake: EngineBinary, mixture: Path) -> None:
    entry = {**MODEL, "offload": {"cpu_moe_layers": 6}, "allow_smaller_context": True}
    async with fleet_of(fake, mixture, {"a": entry}, **options(Card(800))) as fleet:
        fleet.switch("a", no_memory_for=["--ctx-size 4096"])
        await fleet.supervisor.ready(fleet.model("a"))
        status = fleet.supervisor.status(fleet.model("a"))
        # What requests are counted against is what the engine really has.
        assert status.context_tokens == 2048


async def test_who_leaves_between_two_tries_is_not_loaded_for(fake: EngineBinary, mixture: Path) -> None:
    async with fleet_of(fake, mixture, {"a": MODEL}, **options(Card(FREE_MIB))) as fleet:
        fleet.switch("a", load_seconds=0.4, no_memory_for=["--device CUDA0"])
        asking = asyncio.create_task(fleet.supervisor.ready(fleet.model("a")))
        async with asyncio.timeout(10):
            while not fleet.starts():
                await asyncio.sleep(0.01)
            asking.cancel()
            while fleet.state("a") != "stopped":
                await asyncio.sleep(0.01)
        assert fleet.starts() == ["a"]


async def test_a_stop_between_two_tries_leaves_nothing(fake: EngineBinary, mixture: Path) -> None:
    async with fleet_of(fake, mixture, {"a": MODEL}, **options(Card(FREE_MIB))) as fleet:
        fleet.switch("a", load_seconds=0.2, no_memory_for=["--device CUDA0"])
        asking = asyncio.create_task(fleet.supervisor.ready(fleet.model("a")))
        async with asyncio.timeout(15):
            while len(fleet.starts()) < 2:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await fleet.supervisor.close()
        for pid in fleet.pids():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def dies_and_comes_back(fleet: Fleet, number: signal.Signals) -> Cause:
    """End the ready engine, wait for its successor; the cause that was seen."""
    model = fleet.model("a")
    first = await fleet.supervisor.ready(model)
    assert isinstance(first, LocalBackend)
    assert first.process.pid is not None
    os.kill(first.process.pid, number)
    cause = (await first.wait_exit()).cause
    async with asyncio.timeout(15):
        while fleet.supervisor.backend(model) in {None, first}:
            await asyncio.sleep(0.01)
    return cause


async def test_out_of_device_memory_in_mid_answer_comes_back_smaller(fake: EngineBinary, mixture: Path) -> None:
    async with fleet_of(fake, mixture, {"a": MODEL}, **options(Card(FREE_MIB))) as fleet:
        fleet.switch("a", log_lines=["alloc_tensor_range: failed to allocate CUDA0 buffer of size 1"])
        assert await dies_and_comes_back(fleet, signal.SIGABRT) is Cause.OUT_OF_DEVICE_MEMORY
        assert placement_of(fleet) == (13, 4, 256)
        assert fleet.count("engine_restarts_total", model="a", cause="out_of_device_memory") == 1
        assert fleet.count("plan_step_downs_total", model="a") == 1


async def test_row_24_out_of_ram_in_mid_answer_gives_back_what_the_kernel_could_not_take(
    fake: EngineBinary, mixture: Path
) -> None:
    async with fleet_of(fake, mixture, {"a": MODEL}, **options(Card(FREE_MIB))) as fleet:
        fleet.switch("a", log_lines=["terminate called after throwing an instance of 'std::bad_alloc'"])
        assert await dies_and_comes_back(fleet, signal.SIGABRT) is Cause.KILLED_FOR_MEMORY
        plan = fleet.supervisor.status(fleet.model("a")).plan
        assert plan is not None
        (step,) = plan.steps
        assert (step.setting, step.value) == ("load_mode", "mmap")
        # The card has nothing to do with it.
        assert placement_of(fleet) == (13, 4, 512)


async def test_after_a_crash_the_steps_are_not_gone_down_again(fake: EngineBinary, mixture: Path) -> None:
    async with fleet_of(fake, mixture, {"a": MODEL}, **options(Card(FREE_MIB))) as fleet:
        fleet.switch("a", no_memory_for=["--ubatch-size 512"])
        assert await dies_and_comes_back(fleet, signal.SIGSEGV) is Cause.CRASH
        assert fleet.starts() == ["a"] * 3
        assert placement_of(fleet) == (13, 4, 256)
        assert fleet.count("plan_step_downs_total", model="a") == 1


async def test_what_a_load_really_took_is_known_at_the_next(fake: EngineBinary, mixture: Path, tmp_path: Path) -> None:
    """An engine that cannot be asked: its buffers correct the formulas, and the next plan is made with that."""
    learned = {**options(Card(FREE_MIB)), "learned": tmp_path / "learned.json"}
    async with fleet_of(fake, mixture, {"a": MODEL}, **learned) as fleet:
        planned = (await fleet.supervisor.plan(fleet.model("a"))).memory.devices[0]
        sizes = {
            "load_tensors: CUDA0 model": planned.weights_bytes + planned.experts_bytes,
            "llama_kv_cache: CUDA0 KV": 2 * planned.kv_cache_bytes,
            "sched_reserve: CUDA0 compute": planned.compute_bytes,
        }
        fleet.switch("a", log_lines=[f"{what} buffer size = {size / MIB:.2f} MiB" for what, size in sizes.items()])
        await fleet.supervisor.ready(fleet.model("a"))
        assert placement_of(fleet) == (13, 4, 512)
        fleet.supervisor.unload(fleet.model("a"))
        async with asyncio.timeout(10):
            while fleet.state("a") != "stopped":
                await asyncio.sleep(0.01)
        await fleet.supervisor.ready(fleet.model("a"))
        # Twice the cache leaves room for the experts of fewer layers; no try was wasted on finding out.
        assert placement_of(fleet)[1] > 4
        assert len(fleet.starts()) == 2
        plan = fleet.supervisor.status(fleet.model("a")).plan
        assert plan is not None
        assert "caches x2.00" in {reason.setting: reason.value for reason in plan.reasons}["correction"]


@pytest.mark.slow
def test_a_request_that_waited_through_the_steps_is_answered_and_the_operator_sees_them(
    mixture: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "engine": {"binary": str(fake_binary(tmp_path))},
        "memory": {"vram_reserve": 0, "ram_reserve": 0},
        "models": {"a": {"path": str(mixture), **MODEL}},
    }
    environment = {
        "FAKE_DEVICES": f"CUDA0: a card (8000 MiB, {FREE_MIB} MiB free)",
        "FAKE_ENGINE": json.dumps({"no_memory_for": ["--ubatch-size 512", "--n-cpu-moe 4"]}),
    }
    with running_gateway(config, tmp_path, environment=environment) as gateway:
        body = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        document = httpx.get(f"{gateway.url}/admin/models/a").json()
        assert [(step["setting"], step["value"]) for step in document["step_downs"]] == [
            ("ubatch", "256"),
            ("cpu_moe_layers", "6"),
        ]
        assert (document["state"], document["deaths"], document["failure"]) == ("ready", 0, None)
        plan = httpx.get(f"{gateway.url}/admin/models/a/plan").json()
        assert (plan["placement"]["ubatch"], plan["placement"]["cpu_moe_layers"]) == (256, 6)
        assert plan["argv"][plan["argv"].index("--n-cpu-moe") + 1] == "6"
        because = {reason["setting"]: reason["because"] for reason in plan["reasons"]}
        assert because["cpu_moe_layers"].startswith("step 2 of at most 6 down from 4")
        assert 'llama_gateway_plan_step_downs_total{model="a"} 2.0' in httpx.get(f"{gateway.url}/metrics").text


# --- who else takes memory, on a clock of its own ---------------------------------------------------------------------


class Roomy(World):
    """RAM is no matter here."""

    def check(self) -> None:
        assert len(self.live) == 1


class Crowded(SimulatedEngine):
    """An engine that finds no memory when its plan counts on more than is really free."""

    card: Card
    plans: list[OffloadPlan]

    async def start(self) -> None:
        self.plans.append(self.plan)
        if self.plan.memory.devices[0].total_bytes > self.card.free_mib * MIB:
            self.end(Cause.OUT_OF_DEVICE_MEMORY)
            raise EngineDied(self.exit.result())
        await super().start()


async def beside_another_program(model: Path, *, comes_back: bool) -> list[OffloadPlan]:
    """Row 26: the plans that were tried when another program takes 200 MiB between the plan and the load."""
    card, world, plans = Card(FREE_MIB), Roomy(), list[OffloadPlan]()
    crowd = type("Crowd", (Crowded,), {"card": card, "plans": plans})
    settings = settings_for(model, Path("state"), {"a": MODEL}, memory={"vram_reserve": 0})

    def make_backend(entry: ModelConfig, plan: OffloadPlan) -> LocalBackend:
        if not plans:
            card.free_mib -= 200
            if comes_back:
                asyncio.get_running_loop().call_later(3, setattr, card, "free_mib", FREE_MIB)
        return cast(LocalBackend, crowd(world, entry, plan))

    supervisor = Supervisor(
        ModelCatalog(settings),
        engine=cast(EngineBinary, None),
        memory=settings.memory,
        run_dir=Path("run"),
        metrics=Metrics(),
        events=EventLog(),
        probe=card,
        make_backend=make_backend,
    )
    await supervisor.ready(next(iter(ModelCatalog(settings))))
    await supervisor.close()
    return plans


def test_memory_that_another_program_took_is_planned_around_and_said(mixture: Path) -> None:
    plans: list[OffloadPlan] = []

    async def main() -> None:
        plans.extend(await beside_another_program(mixture, comes_back=False))

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    first, second = plans
    (step,) = second.steps
    assert step.value == "less 200 MiB of CUDA0"
    assert "other programs took that" in step.because
    assert second.memory.devices[0].total_bytes <= (FREE_MIB - 200) * MIB < first.memory.devices[0].total_bytes
    # One plan for what is there, not one notch after the other.
    assert second.placement.ubatch == first.placement.ubatch


def test_memory_that_comes_back_costs_one_notch(mixture: Path) -> None:
    plans: list[OffloadPlan] = []

    async def main() -> None:
        plans.extend(await beside_another_program(mixture, comes_back=True))

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    assert [step.setting for step in plans[-1].steps] == ["ubatch"]
