"""The plan: the best placement that fits, wishes kept exactly, or the numbers that forbid it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import ContextAboveTrained, DeviceMissing, DoesNotFit
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine
from app.memory import KVType, MemoryModel
from app.offload import OffloadPlan, Wish, plan_offload
from tests import shapes
from tests.gguf_writer import U32, Shape, Tensor, write

MIB = 1 << 20
GIB = 1 << 30


def machine(*free_mib: int, ram_gib: float = 30, threads: int = 8) -> Machine:
    devices = tuple(
        Device(name=f"GPU{number}", description="card", total_bytes=(free + 600) * MIB, free_bytes=free * MIB)
        for number, free in enumerate(free_mib)
    )
    ram = int(ram_gib * GIB)
    return Machine(devices=devices, ram_total_bytes=ram + 2 * GIB, ram_available_bytes=ram, threads=threads)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Shape], ModelFacts]:
    folder = tmp_path_factory.mktemp("shapes")
    return lambda name, shape: read_header(write(folder / f"{name}.gguf", shape))


@pytest.fixture(scope="module")
def a3b(written: Callable[[str, Shape], ModelFacts]) -> ModelFacts:
    return written("Qwen3.6-35B-A3B-Q4_K_M", shapes.qwen35moe())


@pytest.fixture(scope="module")
def dense32b(written: Callable[[str, Shape], ModelFacts]) -> ModelFacts:
    sizes: dict[str, Any] = {"layers": 64, "embedding": 5120, "heads": 64, "kv_heads": 8, "feed_forward": 25600}
    return written("Qwen3-32B-Q4_K_M", shapes.dense(architecture="qwen3", vocabulary=151936, **sizes))


@pytest.fixture(scope="module")
def tiny(written: Callable[[str, Shape], ModelFacts]) -> ModelFacts:
    sizes: dict[str, Any] = {"layers": 8, "embedding": 1024, "heads": 16, "kv_heads": 4, "head_length": 64}
    return written("tiny", shapes.dense(feed_forward=4096, vocabulary=32000, **sizes))


def assert_within_budgets(plan: OffloadPlan) -> None:
    for device, ledger in zip(plan.machine.devices, plan.memory.devices, strict=True):
        assert ledger.total_bytes <= max(0, device.free_bytes - plan.wish.vram_reserve_bytes)
    assert plan.memory.host.total_bytes <= plan.machine.ram_available_bytes - plan.wish.ram_reserve_bytes


# --- the case that people come for --------------------------------------------------------------------------------


def test_35b_a3b_on_an_8_gib_card(a3b: ModelFacts) -> None:
    plan = plan_offload(a3b, machine(7600), Wish(context=32768, kv_cache="q8_0"))
    assert plan.placement.gpu_layers == 41
    assert plan.placement.cpu_moe_layers == 30
    # The engine's word: 6,965 MiB, and 7,021 with the ubatch that what is left makes room for.
    assert plan.placement.ubatch == 1024
    assert plan.memory.devices[0].total_bytes == pytest.approx(7022 * MIB, abs=8 * MIB)
    assert 0 < plan.placement.context_checkpoints <= 8
    assert 0 < plan.placement.cache_ram_mib <= 4096
    assert_within_budgets(plan)


def test_35b_a3b_with_six_bits_in_every_down_matrix(written: Callable[[str, Shape], ModelFacts]) -> None:
    def kind(name: str, layer: int) -> str:
        return "Q6_K" if name in ("output", "ffn_down_exps") else "Q8_0" if "exps" not in name else "Q4_K"

    facts = written("a3b-dynamic", shapes.qwen35moe(kind=kind))
    plan = plan_offload(facts, machine(7600), Wish(context=32768, kv_cache="q8_0"))
    assert plan.placement.cpu_moe_layers == 32
    assert_within_budgets(plan)


def test_auto_cache_is_q8_0_where_f16_would_cost_an_expert_layer(a3b: ModelFacts) -> None:
    plan = plan_offload(a3b, machine(7600), Wish(context=32768))
    f16 = plan_offload(a3b, machine(7600), Wish(context=32768, kv_cache="f16"))
    assert plan.placement.kv_cache_k is KVType.Q8_0
    assert plan.placement.cpu_moe_layers < f16.placement.cpu_moe_layers


def test_auto_cache_is_f16_where_it_is_free(a3b: ModelFacts) -> None:
    plan = plan_offload(a3b, machine(24000), Wish(context=32768))
    assert plan.placement.cpu_moe_layers == 0
    assert plan.placement.kv_cache_k is KVType.F16


def test_35b_a3b_with_too_little_ram_is_refused_with_the_numbers(a3b: ModelFacts) -> None:
    with pytest.raises(DoesNotFit, match="MiB of RAM beside what the devices hold") as caught:
        plan_offload(a3b, machine(7600, ram_gib=12), Wish(context=32768, kv_cache="q8_0"))
    assert caught.value.numbers["ram_budget_bytes"] == 10 * GIB
    assert caught.value.numbers["ram_needed_bytes"] > 14 * GIB


def test_35b_a3b_with_24_gib_of_ram_has_smaller_caches(a3b: ModelFacts) -> None:
    roomy = plan_offload(a3b, machine(7600, ram_gib=30), Wish(context=32768))
    tight = plan_offload(a3b, machine(7600, ram_gib=18), Wish(context=32768))
    assert tight.placement.cache_ram_mib < roomy.placement.cache_ram_mib
    assert (roomy.placement.load_mode, tight.placement.load_mode) == ("none", "mmap")
    assert_within_budgets(tight)


def test_35b_a3b_on_two_cards(a3b: ModelFacts) -> None:
    plan = plan_offload(a3b, machine(7600, 11500), Wish(context=32768))
    alone = plan_offload(a3b, machine(11500), Wish(context=32768))
    assert plan.placement.cpu_moe_layers < alone.placement.cpu_moe_layers
    assert sum(plan.placement.tensor_split) == plan.placement.gpu_layers
    assert all(ledger.total_bytes for ledger in plan.memory.devices)
    assert_within_budgets(plan)


def test_35b_a3b_on_larger_cards(a3b: ModelFacts) -> None:
    twelve = plan_offload(a3b, machine(11500), Wish(context=32768))
    assert (twelve.placement.gpu_layers, twelve.placement.cpu_moe_layers) == (41, 22)
    assert_within_budgets(twelve)
    twenty_four = plan_offload(a3b, machine(24000), Wish(context=32768, parallel=2))
    assert (twenty_four.placement.gpu_layers, twenty_four.placement.cpu_moe_layers) == (41, 0)
    assert twenty_four.placement.kv_cache_k is KVType.F16
    assert_within_budgets(twenty_four)


def test_35b_a3b_without_a_card(a3b: ModelFacts) -> None:
    plan = plan_offload(a3b, machine(), Wish(context=32768))
    assert (plan.placement.gpu_layers, plan.memory.devices) == (0, ())
    assert plan.memory.host.needed_bytes == pytest.approx(20.3 * GIB, rel=0.03)
    assert_within_budgets(plan)
    with pytest.raises(DoesNotFit):
        plan_offload(a3b, machine(ram_gib=20), Wish(context=32768))


# --- dense models -------------------------------------------------------------------------------------------------


def test_dense_32b_on_an_8_gib_card(dense32b: ModelFacts) -> None:
    plan = plan_offload(dense32b, machine(7600), Wish(context=4096))
    assert 20 <= plan.placement.gpu_layers <= 23
    assert_within_budgets(plan)
    one_more = replace(plan.placement, gpu_layers=plan.placement.gpu_layers + 1)
    ledger = MemoryModel(dense32b).ledger(one_more, device_names=["GPU0"])
    assert ledger.devices[0].total_bytes > 7088 * MIB


def test_exact_wishes_are_kept(dense32b: ModelFacts, a3b: ModelFacts) -> None:
    assert plan_offload(dense32b, machine(7600), Wish(context=4096, gpu_layers=12)).placement.gpu_layers == 12
    assert plan_offload(dense32b, machine(24000), Wish(context=4096, gpu_layers=99)).placement.gpu_layers == 65
    experts = plan_offload(a3b, machine(7600), Wish(context=4096, cpu_moe_layers=38)).placement
    assert (experts.gpu_layers, experts.cpu_moe_layers) == (41, 38)


def test_exact_wishes_are_refused_with_the_numbers(dense32b: ModelFacts, a3b: ModelFacts) -> None:
    with pytest.raises(DoesNotFit, match="as gpu_layers asks: 22 of 65 layers") as caught:
        plan_offload(dense32b, machine(7600), Wish(context=16384, gpu_layers=22))
    assert caught.value.numbers["device_needed_bytes"] > caught.value.numbers["device_budget_bytes"] == 7088 * MIB
    with pytest.raises(DoesNotFit, match="as cpu_moe_layers asks"):
        plan_offload(a3b, machine(7600), Wish(context=4096, cpu_moe_layers=3))


def test_without_a_device_everything_is_in_ram(dense32b: ModelFacts) -> None:
    plan = plan_offload(dense32b, machine(threads=6), Wish(context=4096))
    assert (plan.placement.gpu_layers, plan.placement.threads) == (0, 6)
    assert plan.placement.batch == plan.placement.ubatch == 128
    assert plan.placement.load_mode == "mmap"
    assert plan.memory.devices == ()


def test_a_device_that_is_asked_for_must_exist(tiny: ModelFacts) -> None:
    for wish in (Wish(require_gpu=True), Wish(gpu_layers=4)):
        with pytest.raises(DeviceMissing, match="sees none"):
            plan_offload(tiny, machine(), wish)
    assert plan_offload(tiny, machine(), Wish(gpu_layers=0)).placement.gpu_layers == 0


def test_a_full_device_holds_nothing_unless_required(tiny: ModelFacts) -> None:
    assert plan_offload(tiny, machine(100), Wish()).placement.gpu_layers == 0
    with pytest.raises(DoesNotFit, match="as require_gpu asks"):
        plan_offload(tiny, machine(100), Wish(require_gpu=True))


def test_a_larger_ubatch_never_costs_a_layer(a3b: ModelFacts, dense32b: ModelFacts) -> None:
    for facts, context in ((a3b, 32768), (dense32b, 4096)):
        for free in range(4000, 16000, 700):
            plan = plan_offload(facts, machine(free), Wish(context=context, kv_cache="q8_0"))
            if not plan.placement.gpu_layers:
                continue
            assert plan.placement.ubatch in (512, 1024, 2048)
            model, names = MemoryModel(facts), ["GPU0"]
            for more in (
                replace(plan.placement, ubatch=512, cpu_moe_layers=plan.placement.cpu_moe_layers - 1),
                replace(plan.placement, ubatch=512, gpu_layers=plan.placement.gpu_layers + 1),
            ):
                if more.cpu_moe_layers < 0 or more.gpu_layers > model.all_layers:
                    continue
                assert model.ledger(more, device_names=names).devices[0].total_bytes > (free - 512) * MIB
            assert_within_budgets(plan)


# --- context, parallel, embedding, projector ----------------------------------------------------------------------


def test_context_defaults_to_8192_within_what_was_trained(
    tiny: ModelFacts, written: Callable[[str, Shape], ModelFacts]
) -> None:
    assert plan_offload(tiny, machine(), Wish()).placement.context_per_request == 8192
    short = written("short", shapes.dense(layers=2, embedding=256, heads=4, head_length=64, context=2048))
    assert plan_offload(short, machine(), Wish()).placement.context_per_request == 2048
    with pytest.raises(ContextAboveTrained, match="trained for 2048 tokens") as caught:
        plan_offload(short, machine(), Wish(context=4096))
    assert caught.value.numbers == {"context_tokens": 4096, "context_trained_tokens": 2048}


def test_context_and_parallel_are_kept_or_refused(tiny: ModelFacts) -> None:
    plan = plan_offload(tiny, machine(), Wish(context=65536, parallel=4, kv_cache="f16"))
    assert (plan.placement.context_per_request, plan.placement.parallel) == (65536, 4)
    with pytest.raises(DoesNotFit, match="for 64 requests of 65536 tokens"):
        plan_offload(tiny, machine(ram_gib=8), Wish(context=65536, parallel=64))


def test_a_cache_that_exceeds_the_ram_is_quantised(tiny: ModelFacts) -> None:
    kinds = [
        plan_offload(tiny, machine(ram_gib=ram), Wish(context=65536, parallel=16)).placement.kv_cache_k
        for ram in (12, 8, 5)
    ]
    assert kinds == [KVType.F16, KVType.Q8_0, KVType.Q4_0]


def test_an_embedding_has_its_whole_context_in_one_batch(tiny: ModelFacts) -> None:
    placement = plan_offload(tiny, machine(7600), Wish(context=3000, embedding=True)).placement
    assert placement.batch == placement.ubatch == 3072
    assert placement.cache_ram_mib == 0


def test_odd_heads_have_no_quantised_cache(written: Callable[[str, Shape], ModelFacts]) -> None:
    odd = written(
        "odd", shapes.dense(layers=2, embedding=400, heads=5, kv_heads=5, head_length=80, kind=shapes.uniform("F16"))
    )
    assert plan_offload(odd, machine(), Wish()).placement.kv_cache_k is KVType.F16
    with pytest.raises(DoesNotFit, match="cannot have a q8_0 cache"):
        plan_offload(odd, machine(), Wish(kv_cache="q8_0"))


@pytest.fixture
def projector(written: Callable[[str, Shape], ModelFacts]) -> ModelFacts:
    keys = {
        "vision.image_size": U32(896),
        "vision.patch_size": U32(14),
        "vision.embedding_length": U32(1152),
        "vision.feed_forward_length": U32(4304),
        "vision.attention.head_count": U32(16),
    }
    return written("mmproj", Shape("clip", keys, [Tensor("v.blk.0.ffn.weight", (1024, 200_000), "F16")], 0))


def test_a_projector_goes_to_the_device_where_it_costs_nothing(a3b: ModelFacts, projector: ModelFacts) -> None:
    roomy = plan_offload(a3b, machine(24000), Wish(context=4096), mmproj=projector)
    assert roomy.placement.mmproj_on == "GPU0"
    assert roomy.memory.devices[0].mmproj_bytes > projector.tensors[0].size_bytes
    tight = plan_offload(a3b, machine(7600), Wish(context=32768), mmproj=projector)
    without = plan_offload(a3b, machine(7600), Wish(context=32768))
    assert tight.placement.mmproj_on == "host"
    assert tight.placement.cpu_moe_layers == without.placement.cpu_moe_layers
    assert tight.memory.host.weights_bytes > without.memory.host.weights_bytes + projector.tensors[0].size_bytes


# --- any machine --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    free=st.lists(st.integers(0, 26000), max_size=3),
    ram_gib=st.floats(1, 64),
    context=st.integers(256, 131072),
    parallel=st.integers(1, 8),
    which=st.sampled_from(["a3b", "dense32b", "tiny"]),
)
def test_no_plan_exceeds_its_budgets(
    request: pytest.FixtureRequest, free: list[int], ram_gib: float, context: int, parallel: int, which: str
) -> None:
    facts = request.getfixturevalue(which)
    try:
        plan = plan_offload(facts, machine(*free, ram_gib=ram_gib), Wish(context=context, parallel=parallel))
    except DoesNotFit as refusal:
        needed, budget = refusal.numbers["ram_needed_bytes"], refusal.numbers["ram_budget_bytes"]
    else:
        assert_within_budgets(plan)
        assert (plan.placement.context_per_request, plan.placement.parallel) == (context, parallel)
        return
    assert needed > budget


# --- what is shown ------------------------------------------------------------------------------------------------


PARTS = "weights_bytes experts_bytes kv_cache_bytes state_bytes compute_bytes"
CONTRACT = {
    "model": "name path architecture file_bytes parameters layers experts context_trained",
    "machine": "devices ram_total_bytes ram_available_bytes threads",
    "placement": (
        "gpu_layers cpu_moe_layers tensor_split kv_cache_k kv_cache_v flash_attention context_per_request parallel "
        "batch ubatch threads load_mode cache_ram_mib mmproj_on"
    ),
    "memory": "devices host",
    "expected": "decode_tokens_per_second prompt_tokens_per_second basis",
}


def test_document_has_the_shape_of_the_contract(a3b: ModelFacts) -> None:
    plan = plan_offload(a3b, machine(7600), Wish(context=32768))
    document = json.loads(json.dumps(plan.document(argv=["llama-server", "-m", "x"])))
    for part, keys in CONTRACT.items():
        assert list(document[part]) == keys.split()
    device, host = document["memory"]["devices"][0], document["memory"]["host"]
    assert (
        list(device)
        == f"name {PARTS} mmproj_bytes draft_bytes moe_cache_bytes total_bytes reserve_bytes left_bytes".split()
    )
    assert list(host) == f"{PARTS} prompt_cache_bytes checkpoints_bytes total_bytes left_bytes".split()
    assert device["total_bytes"] + device["reserve_bytes"] + device["left_bytes"] == 7600 * MIB
    assert (
        sum(host[part] for part in (*PARTS.split(), "prompt_cache_bytes", "checkpoints_bytes")) == host["total_bytes"]
    )
    assert document["verified"] is None
    assert document["argv"] == ["llama-server", "-m", "x"]
    settings_explained = {reason["setting"] for reason in document["reasons"]}
    assert set(document["placement"]) - {"tensor_split", "mmproj_on"} <= settings_explained


def test_summary_is_three_lines(a3b: ModelFacts, tiny: ModelFacts) -> None:
    for plan in (plan_offload(a3b, machine(7600), Wish(context=32768)), plan_offload(tiny, machine(), Wish())):
        lines = plan.summary()
        assert len(lines) == 3
        assert all(line and "\n" not in line for line in lines)
    assert "experts of 30 layers in RAM" in plan_offload(a3b, machine(7600), Wish(context=32768)).summary()[1]


def test_an_unknown_architecture_says_so(written: Callable[[str, Shape], ModelFacts]) -> None:
    facts = written("new", shapes.dense(architecture="brand-new", layers=2, embedding=256, heads=4, head_length=64))
    reasons = plan_offload(facts, machine(7600), Wish()).reasons
    assert reasons[0].setting == "architecture"


def test_expected_speed_follows_the_bytes(dense32b: ModelFacts) -> None:
    speeds = [
        plan_offload(dense32b, machine(*free), Wish(context=4096)).expected.decode_tokens_per_second
        for free in ([], [7600], [30000])
    ]
    assert all(speeds)
    assert speeds == sorted(speeds, key=lambda speed: speed or 0)
    assert speeds[2] == pytest.approx(15, abs=3)  # 19 GB at 300 GB/s


def test_a_plan_is_made_in_a_tenth_of_a_second(a3b: ModelFacts, dense32b: ModelFacts) -> None:
    begin = time.process_time()
    plan_offload(a3b, machine(7600), Wish(context=32768))
    plan_offload(dense32b, machine(7600, 3000), Wish(context=4096))
    assert time.process_time() - begin < 0.5
