"""Who must stop so that a model fits: pure choices, then with memory that comes back late."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import DoesNotFit, ModelFailed
from app.eviction import Evict, Go, Resident, SharingRules, Wait, choose, is_settled, victims
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine
from app.offload import OffloadPlan, Wish, plan_offload
from app.supervisor.holdings import Holding, left_over
from app.supervisor.restarts import RestartPolicy, RestartRules
from tests.fleet import Fleet, fake_engine_binary, fleet_of

MIB = 1 << 20
RULES = SharingRules(min_residency=10, linger=1, max_wait=20)
SIZES = {"small": 1, "middle": 4, "large": 9}


def resident(name: str, **fields: Any) -> Resident:
    return Resident(name, **({"idle_seconds": 60.0, "resident_seconds": 60.0} | fields))


def frees(needed: int):
    return lambda names: sum(SIZES[name] for name in names) >= needed


# The cheapest set


@pytest.mark.parametrize(("needed", "chosen"), [(0, set()), (1, {"small"}), (5, {"small", "middle"}), (9, {"large"})])
def test_the_cheapest_set_that_is_enough(needed: int, chosen: set[str]) -> None:
    residents = [resident(name, reload_seconds=float(size)) for name, size in SIZES.items()]
    assert victims(residents, frees(needed)) == chosen


def test_no_set_is_enough() -> None:
    assert victims([resident("small")], frees(2)) is None


def test_who_was_not_used_for_longer_goes_first() -> None:
    residents = [resident("middle", idle_seconds=5.0), resident("large", idle_seconds=3600.0)]
    assert victims(residents, frees(4)) == {"large"}


def test_who_is_used_goes_last() -> None:
    residents = [resident("middle", users=1, idle_seconds=0.0), resident("large", idle_seconds=2.0)]
    assert victims(residents, frees(4)) == {"large"}


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 99), st.floats(0, 999)), max_size=12), st.integers(0, 60))
def test_a_choice_is_enough_and_nobody_goes_in_vain(models: list[tuple[int, float, float]], needed: int) -> None:
    sizes = {str(number): size for number, (size, _, _) in enumerate(models)}
    residents = [
        Resident(str(number), reload_seconds=reload, idle_seconds=idle)
        for number, (_, reload, idle) in enumerate(models)
    ]

    def enough(names: frozenset[str]) -> bool:
        return sum(sizes[name] for name in names) >= needed

    chosen = victims(residents, enough)
    if chosen is None:
        assert sum(sizes.values()) < needed
        return
    assert enough(chosen)
    assert not any(enough(chosen - {name}) for name in chosen)


# Go, evict or wait


class Room:
    """A device of 1000 MiB: each resident holds a part of it; the plan has as many layers as fit into the rest."""

    def __init__(self, facts: ModelFacts, held: dict[str, int], *, required: bool = False) -> None:
        self.facts = facts
        self.held = held
        self.required = required

    def __call__(self, gone: frozenset[str]) -> OffloadPlan:
        free = 1000 - sum(size for name, size in self.held.items() if name not in gone)
        machine = Machine((Device("CUDA0", "x", 1000 * MIB, free * MIB),), 64_000 * MIB, 64_000 * MIB, 2)
        wish = Wish(context=512, vram_reserve_bytes=0, gpu_layers=99 if self.required else None)
        return plan_offload(self.facts, machine, wish)


@pytest.fixture(scope="module")
def facts(demo_model: Path) -> ModelFacts:
    return read_header(demo_model)


def test_what_fits_goes(facts: ModelFacts) -> None:
    assert isinstance(choose(Room(facts, {"a": 100}), [resident("a")], waited_seconds=0, rules=RULES), Go)


def test_an_idle_model_goes_when_that_brings_more_layers_onto_the_device(facts: ModelFacts) -> None:
    decision = choose(Room(facts, {"a": 950}), [resident("a")], waited_seconds=0, rules=RULES)
    assert isinstance(decision, Evict)
    assert decision.model_ids == {"a"}
    assert decision.hoped.placement.gpu_layers == facts.layers + 1


@pytest.mark.parametrize("fields", [{"pinned": True}, {"users": 1}])
def test_who_is_pinned_or_used_is_not_stopped_for_better_layers(facts: ModelFacts, fields: dict[str, Any]) -> None:
    decision = choose(Room(facts, {"a": 950}), [resident("a", **fields)], waited_seconds=99, rules=RULES)
    assert isinstance(decision, Go)


def test_who_is_used_is_stopped_when_it_does_not_fit_otherwise_after_a_bounded_wait(facts: ModelFacts) -> None:
    room, residents = Room(facts, {"a": 950}, required=True), [resident("a", users=1)]
    waiting = choose(room, residents, waited_seconds=5, rules=RULES)
    assert waiting == Wait(15)
    assert isinstance(choose(room, residents, waited_seconds=20, rules=RULES), Evict)


def test_who_has_just_been_loaded_has_its_turn_first(facts: ModelFacts) -> None:
    room = Room(facts, {"a": 950}, required=True)
    fresh = resident("a", idle_seconds=0.2, resident_seconds=3.0)
    waiting = choose(room, [fresh], waited_seconds=0, rules=RULES)
    assert isinstance(waiting, Wait)
    assert waiting.seconds == pytest.approx(0.8)
    lingering = replace(fresh, idle_seconds=1.0)
    assert isinstance(choose(room, [lingering], waited_seconds=0, rules=RULES), Evict)


def test_nothing_helps_against_a_pinned_model(facts: ModelFacts) -> None:
    with pytest.raises(DoesNotFit):
        choose(Room(facts, {"a": 950}, required=True), [resident("a", pinned=True)], waited_seconds=99, rules=RULES)


@pytest.mark.parametrize(
    ("fields", "settled"),
    [
        ({"users": 1, "resident_seconds": 99.0}, False),
        ({"idle_seconds": 0.5, "resident_seconds": 5.0}, False),
        ({"idle_seconds": 1.0, "resident_seconds": 5.0}, True),
        ({"idle_seconds": 0.0, "resident_seconds": 10.0}, True),
    ],
)
def test_when_a_turn_is_over(fields: dict[str, Any], settled: bool) -> None:
    assert is_settled(resident("a", **fields), RULES) is settled


# What is left for the next plan


def test_promised_ram_is_not_given_twice() -> None:
    machine = Machine((), 1000, 800, 2)
    # Of 300 promised the system has seen 100 so far: mapped weights never count as taken.
    holding = Holding("a", 300, {}, counted_bytes=100)
    assert left_over(machine, [holding]).ram_available_bytes == 600
    assert left_over(machine, [holding], without={"a"}).ram_available_bytes == 900
    assert left_over(machine, [holding], ram_limit_bytes=500).ram_available_bytes == 200
    assert left_over(machine, [holding], ram_limit_bytes=500, ram_reserve_bytes=50).ram_available_bytes == 250
    assert left_over(machine, [Holding("a", 5000, {})]).ram_available_bytes == 0


def test_a_driver_that_calls_everything_free_is_not_believed() -> None:
    machine = Machine((Device("Vulkan0", "x", 1000, 1000), Device("CUDA0", "y", 1000, 400)), 0, 0, 2)
    holding = Holding("a", 0, {"Vulkan0": 700, "CUDA0": 600})
    assert [device.free_bytes for device in left_over(machine, [holding]).devices] == [300, 400]
    assert [device.free_bytes for device in left_over(machine, [holding], without={"a"}).devices] == [1000, 1000]


# Memory that comes back late, or not at all, or is taken by somebody else


class Gpu:
    """What a driver would report: engines take their plan's share and give it back ``late_seconds`` after their end."""

    def __init__(self, *, late_seconds: float = 0.0) -> None:
        self.late_seconds = late_seconds
        self.fleet: Fleet
        self.foreign_mib = 0
        self.probes = 0
        self._held: dict[str, tuple[int, float]] = {}

    def probe(self) -> Machine:
        self.probes += 1
        now = self.fleet.loop_time()
        for status in self.fleet.supervisor:
            if status.plan is not None and status.pid is not None:
                self._held[status.model.id] = (sum(d.total_bytes for d in status.plan.memory.devices), now)
        held = sum(size for size, seen in self._held.values() if now - seen < self.late_seconds or now == seen)
        free = max(0, 180 * MIB - held - self.foreign_mib * MIB)
        return Machine((Device("CUDA0", "x", 180 * MIB, free),), 64_000 * MIB, 64_000 * MIB, 2)


def layers(fleet: Fleet, name: str) -> int:
    backend = fleet.supervisor.backend(fleet.model(name))
    assert backend is not None
    return backend.plan.placement.gpu_layers


async def on_gpu(gpu: Gpu, demo_model: Path, **options: Any) -> Any:
    return fleet_of(
        fake_engine_binary(),
        demo_model,
        {"a": {}, "b": {}},
        memory={"vram_reserve": 0, "ram_reserve": 0},
        probe=gpu.probe,
        **options,
    )


@pytest.mark.slow
async def test_the_plan_waits_for_memory_that_comes_back_late(demo_model: Path) -> None:
    gpu = Gpu(late_seconds=1.5)
    async with await on_gpu(gpu, demo_model) as fleet:
        gpu.fleet = fleet
        await fleet.supervisor.ready(fleet.model("a"))
        assert layers(fleet, "a") == 31
        await asyncio.sleep(0.1)
        await fleet.supervisor.ready(fleet.model("b"))
        # Not fewer layers only because the driver was slow.
        assert layers(fleet, "b") == 31
        assert fleet.state("a") == "stopped"


@pytest.mark.slow
async def test_a_restart_waits_for_the_memory_of_the_engine_that_died(demo_model: Path) -> None:
    gpu = Gpu(late_seconds=1.5)
    async with await on_gpu(gpu, demo_model, new_policy=lambda: RestartPolicy(RestartRules(0.01))) as fleet:
        gpu.fleet = fleet
        backend = await fleet.supervisor.ready(fleet.model("a"))
        gpu.probe()
        os.kill(backend.process.pid, signal.SIGKILL)
        await fleet.supervisor.replaced(fleet.model("a"), backend)
        await fleet.supervisor.ready(fleet.model("a"))
        assert layers(fleet, "a") == 31


@pytest.mark.slow
async def test_memory_that_never_comes_back_costs_layers_and_a_bounded_wait(demo_model: Path) -> None:
    gpu = Gpu(late_seconds=1e9)
    async with await on_gpu(gpu, demo_model) as fleet:
        gpu.fleet = fleet
        await fleet.supervisor.ready(fleet.model("a"))
        started = fleet.loop_time()
        await fleet.supervisor.ready(fleet.model("b"))
        assert 9 <= fleet.loop_time() - started <= 14
        assert layers(fleet, "b") < 31


async def test_memory_that_another_program_took_is_seen_before_the_load(demo_model: Path) -> None:
    gpu = Gpu()
    async with await on_gpu(gpu, demo_model) as fleet:
        gpu.fleet = fleet
        gpu.foreign_mib = 100
        await fleet.supervisor.ready(fleet.model("a"))
        assert layers(fleet, "a") < 31


async def test_a_model_that_must_have_the_device_says_why_not(demo_model: Path) -> None:
    gpu = Gpu()
    models = {"a": {"offload": {"gpu_layers": 99}}}
    async with fleet_of(fake_engine_binary(), demo_model, models, memory={"vram_reserve": 0}, probe=gpu.probe) as fleet:
        gpu.fleet = fleet
        gpu.foreign_mib = 150
        with pytest.raises(ModelFailed, match="does not fit"):
            await fleet.supervisor.ready(fleet.model("a"))
