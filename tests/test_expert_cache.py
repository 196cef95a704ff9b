"""What is left on a device keeps experts that are in RAM, where the engine can do that."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.accounting import ask_accounting
from app.engine.binary import EngineBinary, find_engine
from app.engine.command import Endpoint, build_argv, knows_moe_cache
from app.engine.environment import child_environment
from app.engine.flags import FLAGS
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine
from app.memory import MemoryModel
from app.offload import Wish, plan_offload
from app.offload.step_down import Shortage, step_down
from tests import shapes
from tests.gguf_writer import write

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    shape = shapes.mixture(layers=12, embedding=1024, experts=64, used=4, expert_feed_forward=512, vocabulary=32000)
    return read_header(write(tmp_path_factory.mktemp("models") / "mixture.gguf", shape))


def machine(*free_mib: int) -> Machine:
    devices = tuple(Device(f"Vulkan{number}", "", mib * MIB, mib * MIB) for number, mib in enumerate(free_mib))
    return Machine(devices, 32 * GIB, 30 * GIB, threads=2)


# As asked for, so that a lot is left.
WISH = Wish(context=4096, cpu_moe_layers=6, moe_cache=True)


def test_the_rest_of_the_device_is_used(mixture: ModelFacts) -> None:
    plan = plan_offload(mixture, machine(1400), WISH)
    device = plan.memory.devices[0]
    left = 1400 * MIB - plan.wish.vram_reserve_bytes - device.total_bytes
    assert plan.placement.moe_cache_mib * MIB == device.moe_cache_bytes > 100 * MIB
    assert 0 <= left < 32 * MIB
    assert "moe_cache_mib" in {reason.setting for reason in plan.reasons}
    assert plan.document()["placement"]["moe_cache_mib"] == plan.placement.moe_cache_mib


def test_no_more_than_there_is_to_keep(mixture: ModelFacts) -> None:
    plan = plan_offload(mixture, machine(20000), WISH)
    assert plan.memory.devices[0].moe_cache_bytes == pytest.approx(plan.memory.host.experts_bytes, abs=MIB)


@pytest.mark.parametrize(
    ("free_mib", "changes"),
    [
        ((1400,), {"moe_cache": False}),
        ((20000,), {"cpu_moe_layers": None}),
        ((1400, 1400), {}),
        ((), {"cpu_moe_layers": None}),
    ],
    ids=["an engine without", "nothing in RAM", "two devices", "no device"],
)
def test_none_where_it_makes_no_sense(
    mixture: ModelFacts, free_mib: tuple[int, ...], changes: dict[str, bool | None]
) -> None:
    plan = plan_offload(mixture, machine(*free_mib), replace(WISH, **changes))  # type: ignore[arg-type]
    assert plan.placement.moe_cache_mib == 0
    assert "moe_cache_mib" not in plan.document()["placement"]


def test_none_that_would_not_hold_the_experts_of_two_tokens(mixture: ModelFacts) -> None:
    plan = plan_offload(mixture, machine(20000), replace(WISH, moe_cache=False))
    model = MemoryModel(mixture)
    needed = 2 * model.token_experts_bytes(plan.placement) + plan.memory.devices[0].total_bytes
    # The ubatch has been raised already.
    free = needed + plan.wish.vram_reserve_bytes
    for spare_mib, some in ((0, False), (40, True)):
        on = machine(free // MIB + spare_mib)
        assert bool(plan_offload(mixture, on, WISH).placement.moe_cache_mib) is some


def test_it_is_the_first_thing_to_go(mixture: ModelFacts) -> None:
    plan = plan_offload(mixture, machine(1400), WISH)
    smaller = step_down(plan, Shortage.DEVICE)
    assert smaller is not None
    assert smaller.placement == replace(plan.placement, moe_cache_mib=0)


def test_only_an_engine_that_knows_it_is_told(mixture: ModelFacts) -> None:
    plan = plan_offload(mixture, machine(1400), WISH)
    everything = frozenset(spelling for flag in FLAGS.values() for spelling in flag.spellings)
    new = EngineBinary((), "native", Path("llama-server"), "1", 1, everything, "")
    old = replace(new, flags=everything - {"--moe-cache-mib"})
    assert (knows_moe_cache(new), knows_moe_cache(old)) == (True, False)
    argv = build_argv(plan, new, alias="x", endpoint=Endpoint(port=1), key_file=None)
    assert argv[argv.index("--moe-cache-mib") + 1] == str(plan.placement.moe_cache_mib)
    assert "--moe-cache-mib" not in build_argv(plan, old, alias="x", endpoint=Endpoint(port=1), key_file=None)


def test_the_engine_counts_it_as_planned(native_engine: Path | None, mixture: ModelFacts) -> None:
    if native_engine is None:
        pytest.skip("no native engine")
    engine = find_engine(str(native_engine))
    if not knows_moe_cache(engine):
        pytest.skip("this engine has no such cache")
    plan = plan_offload(mixture, machine(1400), WISH)
    environment = child_environment(os.environ) | {"GGML_VK_VISIBLE_DEVICES": "0"}
    probe = ask_accounting(plan, engine, environment=environment)
    assert probe.accounting is not None, probe.finding
    (device,) = plan.memory.devices
    row = probe.accounting.device(device.name)
    own = device.kv_cache_bytes + device.moe_cache_bytes
    assert own == pytest.approx(row.context_bytes, abs=6 * MIB)
    assert own >= row.context_bytes - MIB
