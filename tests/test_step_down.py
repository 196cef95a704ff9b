"""The next smaller plan: less of what ran out, nothing beyond any budget, and an end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.engine.binary import EngineBinary
from app.engine.command import Endpoint, build_argv
from app.engine.flags import FLAGS
from app.errors import DoesNotFit
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine
from app.memory import KVType
from app.offload import OffloadPlan, Wish, plan_offload
from app.offload.host import PROCESS_BYTES
from app.offload.step_down import MOST_STEPS, Shortage, step_down
from tests import projector_shapes, shapes
from tests.gguf_writer import write

MIB = 1 << 20
GIB = 1 << 30

SHAPES = {
    "a3b": shapes.qwen35moe(),
    "mixture": shapes.mixture(layers=12, embedding=1024, experts=32, expert_feed_forward=512, vocabulary=32000),
    "dense": shapes.dense(layers=16, embedding=2048, heads=16, kv_heads=8, feed_forward=8192, vocabulary=64000),
    "windows": shapes.gemma3(layers=12),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFacts]:
    folder = tmp_path_factory.mktemp("shapes")
    return {name: read_header(write(folder / f"{name}.gguf", shape)) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_header(write(tmp_path_factory.mktemp("projector") / "p.gguf", projector_shapes.siglip()))


def machine(*free_mib: int, ram_gib: float = 30) -> Machine:
    devices = tuple(
        Device(f"CUDA{number}", "card", (free + 600) * MIB, free * MIB) for number, free in enumerate(free_mib)
    )
    return Machine(devices, int((ram_gib + 2) * GIB), int(ram_gib * GIB), threads=8)


def descent(plan: OffloadPlan, shortage: Shortage) -> Iterator[OffloadPlan]:
    """Every plan on the way down, the first one too."""
    following: OffloadPlan | None = plan
    while following is not None:
        yield following
        following = step_down(following, shortage)


def settings_lowered(plan: OffloadPlan, shortage: Shortage) -> list[str]:
    *_, last = descent(plan, shortage)
    return [step.setting for step in last.steps]


# --- the order of loss --------------------------------------------------------------------------------------------


def test_a_full_card_gives_up_prompt_speed_first_and_experts_two_layers_at_a_time(
    models: dict[str, ModelFacts],
) -> None:
    plan = plan_offload(models["a3b"], machine(7600), Wish(context=32768, kv_cache="q8_0"))
    assert (plan.placement.cpu_moe_layers, plan.placement.ubatch) == (30, 1024)
    plans = list(descent(plan, Shortage.DEVICE))
    assert [step.setting for step in plans[-1].steps] == ["ubatch", "ubatch"] + 4 * ["cpu_moe_layers"]
    assert [each.placement.cpu_moe_layers for each in plans] == [30, 30, 30, 32, 34, 36, 38]
    assert [each.placement.ubatch for each in plans[:3]] == [1024, 512, 256]
    # What each step is worth: two layers of experts are 0.8 GiB and more.
    assert plans[2].memory.devices[0].total_bytes - plans[3].memory.devices[0].total_bytes > 800 * MIB


def test_a_dense_model_gives_up_layers(models: dict[str, ModelFacts]) -> None:
    plan = plan_offload(models["dense"], machine(4000), Wish(context=8192, kv_cache="q8_0"))
    assert plan.placement.gpu_layers == 17
    plans = list(descent(plan, Shortage.DEVICE))
    assert [each.placement.gpu_layers for each in plans] == [17, 17, 15, 13, 11, 9, 7]


def test_a_projector_goes_to_ram_before_any_layer(models: dict[str, ModelFacts], projector: ModelFacts) -> None:
    plan = plan_offload(models["dense"], machine(12000), Wish(context=8192), mmproj=projector)
    assert plan.placement.mmproj_on == "CUDA0"
    assert settings_lowered(plan, Shortage.DEVICE)[:3] == ["ubatch", "mmproj_on", "gpu_layers"]
    *_, last = descent(plan, Shortage.DEVICE)
    assert last.placement.mmproj_on == "host"
    assert last.mmproj is projector


def test_a_draft_goes_before_any_layer_does(models: dict[str, ModelFacts]) -> None:
    draft = models["windows"]
    plan = plan_offload(models["dense"], machine(12000), Wish(context=8192), draft=draft)
    assert (plan.placement.draft_on, plan.memory.devices[0].draft_bytes > 100 * MIB) == ("CUDA0", True)
    plans = list(descent(plan, Shortage.DEVICE))
    assert [step.setting for step in plans[-1].steps][:3] == ["ubatch", "draft_tokens", "gpu_layers"]
    without = plans[2]
    assert without.draft is None
    assert without.memory.devices[0].draft_bytes == 0
    assert without.steps[-1].value == "0"
    assert without.steps[-1] in without.reasons
    assert_coherent(without)


def test_what_the_wish_fixes_stays(models: dict[str, ModelFacts]) -> None:
    by_hand = plan_offload(models["dense"], machine(6000), Wish(context=8192, gpu_layers=17, kv_cache="f16"))
    assert settings_lowered(by_hand, Shortage.DEVICE) == ["ubatch"]
    free_cache = plan_offload(models["dense"], machine(6000), Wish(context=8192, gpu_layers=17))
    assert settings_lowered(free_cache, Shortage.DEVICE) == ["ubatch", "kv_cache_k", "kv_cache_k"]
    *_, last = descent(free_cache, Shortage.DEVICE)
    assert (last.placement.kv_cache_k, last.placement.kv_cache_v) == (KVType.Q4_0, KVType.Q4_0)


def test_the_context_shrinks_only_where_that_is_allowed_and_last(models: dict[str, ModelFacts]) -> None:
    wish = Wish(context=16384, gpu_layers=17, kv_cache="f16", allow_smaller_context=True)
    plan = plan_offload(models["dense"], machine(8000), wish)
    assert settings_lowered(plan, Shortage.DEVICE) == ["ubatch"] + 4 * ["context_per_request"]
    contexts = [each.placement.context_per_request for each in descent(plan, Shortage.DEVICE)]
    assert contexts == [16384, 16384, 8192, 4096, 2048, 1024]
    strict = replace(plan, wish=replace(wish, allow_smaller_context=False))
    assert settings_lowered(strict, Shortage.DEVICE) == ["ubatch"]


def test_a_required_device_keeps_a_layer(models: dict[str, ModelFacts]) -> None:
    plan = plan_offload(models["dense"], machine(1000), Wish(context=2048, kv_cache="q4_0", require_gpu=True))
    assert 1 <= plan.placement.gpu_layers < 10
    assert all(each.placement.gpu_layers >= 1 for each in descent(plan, Shortage.DEVICE))
    free = replace(plan, wish=replace(plan.wish, require_gpu=False))
    *_, last = descent(free, Shortage.DEVICE)
    assert last.placement.gpu_layers == 0
    assert last.memory.devices[0].total_bytes == 0


def test_ram_that_runs_out_in_use_costs_the_caches_of_old_prompts(models: dict[str, ModelFacts]) -> None:
    plan = plan_offload(models["a3b"], machine(7600, ram_gib=40), Wish(context=32768))
    assert plan.placement.load_mode == "none"
    lowered = settings_lowered(plan, Shortage.RAM_IN_USE)
    assert lowered[:2] == ["load_mode", "ubatch"]
    assert {"cache_ram_mib", "context_checkpoints"} <= set(lowered)
    assert "cpu_moe_layers" not in lowered


def test_ram_that_runs_out_at_load_is_not_held_by_caches_that_are_still_empty(models: dict[str, ModelFacts]) -> None:
    plan = plan_offload(models["dense"], machine(ram_gib=9), Wish(context=8192))
    assert plan.placement.cache_ram_mib > 0
    assert settings_lowered(plan, Shortage.RAM_AT_LOAD) == ["kv_cache_k", "kv_cache_k"]
    assert settings_lowered(plan, Shortage.RAM_IN_USE) == ["cache_ram_mib", "kv_cache_k", "kv_cache_k"]


def test_a_plan_without_devices_has_no_step_for_one(models: dict[str, ModelFacts]) -> None:
    assert step_down(plan_offload(models["dense"], machine(), Wish()), Shortage.DEVICE) is None


def test_each_step_is_explained_where_its_setting_is(models: dict[str, ModelFacts]) -> None:
    plan = plan_offload(models["a3b"], machine(7600), Wish(context=32768))
    following = step_down(plan, Shortage.DEVICE)
    assert following is not None
    (step,) = following.steps
    assert step.because == "step 1 of at most 6 down from 1024: with that the device ran out of memory"
    document = following.document()
    told = {reason["setting"]: reason for reason in document["reasons"]}
    assert told["ubatch"] == {"setting": "ubatch", "value": "512", "because": step.because}
    assert document["placement"]["ubatch"] == 512
    # The engine's word was on other flags.
    assert document["verified"] is None


# --- for every model, machine, wish and order of failures ------------------------------------------------------------

wishes = st.builds(
    Wish,
    context=st.sampled_from([2048, 8192, 32768]),
    parallel=st.sampled_from([1, 3]),
    kv_cache=st.sampled_from(["auto", "f16", "q8_0"]),
    gpu_layers=st.sampled_from([None, None, None, 5]),
    cpu_moe_layers=st.sampled_from([None, None, None, 4]),
    require_gpu=st.booleans(),
    allow_smaller_context=st.booleans(),
)
machines = st.builds(
    lambda cards, ram: machine(*cards, ram_gib=ram),
    st.lists(st.sampled_from([700, 1500, 3000, 7600, 24000]), max_size=2),
    st.sampled_from([6, 14, 30, 64]),
)
UNLIMITED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
EVERY_FLAG = frozenset(spelling for flag in FLAGS.values() for spelling in flag.spellings)
ENGINE = EngineBinary(("llama-server",), "native", Path("x"), "1", 1, EVERY_FLAG, "", frozenset({"--flash-attn"}))


def assert_smaller(before: OffloadPlan, after: OffloadPlan, shortage: Shortage) -> None:
    pairs = list(zip(before.memory.devices, after.memory.devices, strict=True))
    assert all(new.total_bytes <= old.total_bytes for old, new in pairs)
    host, old_host = after.memory.host, before.memory.host
    if shortage is Shortage.DEVICE:
        assert sum(new.total_bytes for _, new in pairs) < sum(old.total_bytes for old, _ in pairs)
    else:
        assert host.total_bytes <= old_host.total_bytes
    budget = before.machine.ram_available_bytes - before.wish.ram_reserve_bytes
    assert host.needed_bytes + PROCESS_BYTES <= max(budget, old_host.needed_bytes + PROCESS_BYTES)
    assert after.placement.cache_ram_mib <= before.placement.cache_ram_mib


def assert_coherent(plan: OffloadPlan) -> None:
    placement, wish = plan.placement, plan.wish
    assert placement.ubatch <= placement.batch
    assert placement.flash_attention or not placement.kv_cache_v.quantised
    assert placement.gpu_layers or (placement.cpu_moe_layers == 0 or wish.cpu_moe_layers is not None)
    if placement.tensor_split:
        assert sum(placement.tensor_split) == placement.gpu_layers
    if wish.kv_cache != "auto":
        assert placement.kv_cache_k.value == wish.kv_cache
    if not wish.allow_smaller_context:
        assert placement.context_per_request == wish.context
    assert placement.parallel == wish.parallel
    argv = build_argv(plan, ENGINE, alias="a", endpoint=Endpoint(port=1), key_file=None)
    assert (argv[argv.index("--device") + 1] == "none") == (placement.gpu_layers == 0)
    assert argv[argv.index("--n-gpu-layers") + 1] == str(placement.gpu_layers)
    assert ("--tensor-split" in argv) == (len(placement.tensor_split) > 1)


@UNLIMITED
@given(
    name=st.sampled_from(sorted(SHAPES)),
    on=machines,
    wish=wishes,
    shortages=st.lists(st.sampled_from(Shortage), min_size=MOST_STEPS + 1, max_size=MOST_STEPS + 1),
)
def test_every_step_takes_less_and_they_end(
    models: dict[str, ModelFacts], name: str, on: Machine, wish: Wish, shortages: list[Shortage]
) -> None:
    try:
        plan = plan_offload(models[name], on, wish)
    except DoesNotFit:
        return
    for number, shortage in enumerate(shortages, start=1):
        following = step_down(plan, shortage)
        if following is None:
            return
        assert_smaller(plan, following, shortage)
        assert_coherent(following)
        assert len(following.steps) == number <= MOST_STEPS
        plan = following
    pytest.fail("there were more steps than may be")
