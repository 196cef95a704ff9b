"""The ledger against arithmetic by hand and against the engine's own accounting."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.engine.accounting import ask_accounting
from app.engine.binary import find_engine
from app.engine.environment import child_environment
from app.errors import ModelFileError
from app.gguf import ModelFacts, read_header
from app.hardware import Machine
from app.memory import KVType, MemoryLedger, MemoryModel, Placement, estimate
from app.offload import Wish, plan_offload
from tests import further_shapes, projector_shapes, recurrent_shapes, shapes
from tests.engine_accounting import MIB, accounting
from tests.gguf_writer import U32, Shape, write
from tests.placements import BASE

ALL = replace(BASE, gpu_layers=999)


def small_dense(**changes: Any) -> Shape:
    sizes: dict[str, Any] = {"layers": 8, "embedding": 1024, "heads": 16, "kv_heads": 4, "head_length": 64}
    return shapes.dense(**(sizes | {"feed_forward": 4096, "vocabulary": 32000} | changes))


def small_mixture(**changes: Any) -> Shape:
    sizes: dict[str, Any] = {"layers": 6, "embedding": 1024, "experts": 32, "expert_feed_forward": 512}
    return shapes.mixture(**(sizes | {"vocabulary": 32000} | changes))


def small_hybrid(**changes: Any) -> Shape:
    sizes: dict[str, Any] = {"layers": 8, "experts": 32, "vocabulary": 32000}
    return shapes.qwen35moe(**(sizes | changes))


def middle_mixture() -> Shape:
    return shapes.mixture(layers=12, vocabulary=32000, kind=shapes.uniform("Q4_K"))


def middle_hybrid() -> Shape:
    return shapes.qwen35moe(layers=16, experts=128, vocabulary=32000)


Facts = Callable[[Shape], ModelFacts]


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return lambda shape: read_header(write(tmp_path / f"{shape.architecture}.gguf", shape))


def on_device(facts: ModelFacts, placement: Placement) -> MemoryLedger:
    return estimate(facts, placement, device_names=["GPU"])


def sizes(shape: Shape, *, start: str = "", contains: str = "") -> int:
    return sum(t.size_bytes for t in shape.tensors if t.name.startswith(start) and contains in t.name)


# --- weights ------------------------------------------------------------------------------------------------------


def test_everything_on_the_device_leaves_the_embedding_in_ram(facts: Facts) -> None:
    shape = small_dense()
    ledger = on_device(facts(shape), ALL)
    assert ledger.host.weights_bytes == sizes(shape, start="token_embd")
    assert ledger.devices[0].weights_bytes == sizes(shape) - sizes(shape, start="token_embd")


def test_the_output_layer_is_offloaded_first_and_the_last_blocks_after_it(facts: Facts) -> None:
    shape = small_dense()
    output = sizes(shape, start="output")
    for layers in (1, 3):
        on_gpu = sum(sizes(shape, start=f"blk.{number}.") for number in range(9 - layers, 8))
        assert on_device(facts(shape), replace(BASE, gpu_layers=layers)).devices[0].weights_bytes == output + on_gpu


def test_tied_embeddings_are_loaded_twice(facts: Facts) -> None:
    shape = small_dense(tied=True)
    ledger = on_device(facts(shape), ALL)
    assert ledger.host.weights_bytes + ledger.devices[0].weights_bytes == sizes(shape) + sizes(
        shape, start="token_embd"
    )


def test_experts_of_the_first_layers_stay_in_ram(facts: Facts) -> None:
    shape = small_mixture()
    ledger = on_device(facts(shape), replace(ALL, cpu_moe_layers=2))
    in_ram = sum(sizes(shape, start=f"blk.{number}.", contains="_exps") for number in range(2))
    assert ledger.host.experts_bytes == in_ram
    assert ledger.devices[0].experts_bytes == sizes(shape, contains="_exps") - in_ram


def test_a_draft_head_is_not_loaded_but_counts_as_a_layer(facts: Facts) -> None:
    with_head, without = small_hybrid(draft_head=True), small_hybrid()
    model = MemoryModel(facts(with_head))
    assert model.all_layers == 10
    assert on_device(facts(with_head), ALL) == on_device(facts(without), ALL)


def test_layers_are_shared_by_the_split(facts: Facts) -> None:
    shape = small_dense()
    ledger = estimate(facts(shape), replace(ALL, tensor_split=(3.0, 6.0)), device_names=["A", "B"])
    assert ledger.devices[0].weights_bytes == sum(sizes(shape, start=f"blk.{number}.") for number in range(3))
    assert ledger.devices[1].kv_cache_bytes == 5 * ledger.devices[0].kv_cache_bytes // 3


def test_an_embedding_needs_logits_of_every_token(facts: Facts) -> None:
    shape = small_dense()
    one = on_device(facts(shape), ALL).devices[0].compute_bytes
    every = on_device(facts(shape), replace(ALL, embedding=True)).devices[0].compute_bytes
    assert every - one == 4 * 32000 * 511


# --- caches and states --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "row"), [("f32", 1024), ("f16", 512), ("q8_0", 272), ("q5_1", 192), ("q4_0", 144), ("iq4_nl", 144)]
)
def test_cache_types(facts: Facts, kind: str, row: int) -> None:
    placement = replace(ALL, kv_cache_k=KVType(kind), kv_cache_v=KVType(kind))
    assert on_device(facts(small_dense()), placement).devices[0].kv_cache_bytes == 8 * 2 * row * 4096


def test_slots_are_padded_to_256_cells_and_share_nothing(facts: Facts) -> None:
    one = on_device(facts(small_dense()), replace(ALL, context_per_request=4096)).devices[0].kv_cache_bytes
    four = on_device(facts(small_dense()), replace(ALL, context_per_request=3900, parallel=4)).devices[0].kv_cache_bytes
    assert four == 4 * one


def test_heads_by_layer(facts: Facts) -> None:
    shape = small_dense(keys={"attention.head_count_kv": [4, 0, 2, 0, 4, 0, 2, 0]})
    assert on_device(facts(shape), ALL).devices[0].kv_cache_bytes == 12 * 2 * 64 * 2 * 4096


def test_windows_keep_themselves_and_a_batch(facts: Facts) -> None:
    ledger = on_device(facts(shapes.gemma3(layers=12)), replace(ALL, context_per_request=32768))
    assert ledger.devices[0].kv_cache_bytes == 2 * 2 * 1024 * (2 * 32768 + 10 * 1536)
    model = MemoryModel(facts(shapes.gemma3(layers=12)))
    assert model.checkpoint_bytes(replace(ALL, context_per_request=32768)) == 2 * 2 * 1024 * 10 * 1536


def test_latent_attention_keeps_one_key_and_no_value(facts: Facts) -> None:
    assert on_device(facts(shapes.deepseek2()), ALL).devices[0].kv_cache_bytes == 27 * 576 * 2 * 4096


def test_hybrids_keep_a_state_per_slot(facts: Facts) -> None:
    ledger = on_device(facts(shapes.qwen35moe()), replace(ALL, parallel=2))
    state = 4 * 30 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096)
    assert ledger.devices[0].state_bytes == 2 * state
    assert ledger.devices[0].kv_cache_bytes == 2 * 10 * 2 * 512 * 2 * 4096
    assert MemoryModel(facts(shapes.qwen35moe())).checkpoint_bytes(ALL) == state


def test_cuda_unpacks_a_quantised_cache_of_one_layer(facts: Facts) -> None:
    model = MemoryModel(facts(small_dense()))

    def compute(device: str, kind: KVType) -> int:
        placement = replace(ALL, kv_cache_k=kind, kv_cache_v=kind)
        return model.ledger(placement, device_names=[device]).devices[0].compute_bytes

    assert compute("CUDA0", KVType.Q8_0) - compute("Vulkan0", KVType.Q8_0) == 2 * 4096 * 2 * 4 * 64
    assert compute("CUDA0", KVType.F16) == compute("Vulkan0", KVType.F16)


def test_pipelined_devices_keep_copies_of_what_they_hand_on(facts: Facts) -> None:
    model = MemoryModel(facts(middle_mixture()))

    def compute(**changes: Any) -> list[int]:
        placement = replace(ALL, tensor_split=(6.0, 7.0), **changes)
        ledger = model.ledger(placement, device_names=["A", "B"])
        return [*(device.compute_bytes for device in ledger.devices), ledger.host.compute_bytes]

    alone = model.ledger(ALL, device_names=["A"])
    both = compute()
    assert both[0] > both[1] > alone.devices[0].compute_bytes
    assert both[2] > alone.host.compute_bytes
    # Any override of a tensor's place ends the pipeline, and only the device that computes with experts copies them.
    partial = compute(cpu_moe_layers=2)
    assert partial[1] < both[1]
    assert partial[0] > partial[1]


def test_caches_in_ram_are_counted(facts: Facts) -> None:
    placement = replace(ALL, parallel=2, cache_ram_mib=1000, context_checkpoints=3)
    host = on_device(facts(small_hybrid()), placement).host
    assert host.prompt_cache_bytes == 1000 * MIB
    assert host.checkpoints_bytes == 2 * 3 * MemoryModel(facts(small_hybrid())).checkpoint_bytes(placement)
    assert host.total_bytes == host.needed_bytes + host.prompt_cache_bytes + host.checkpoints_bytes


def test_unknown_architecture_uses_generic_formulas_and_says_so(facts: Facts) -> None:
    shape = small_dense(architecture="some-new-model")
    assert not MemoryModel(facts(shape)).known
    assert MemoryModel(facts(small_dense())).known
    assert on_device(facts(shape), ALL) == on_device(facts(small_dense()), ALL)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("block_count", U32(0)),
        ("block_count", U32(1 << 31)),
        ("block_count", "many"),
        ("embedding_length", U32(0)),
        ("embedding_length", -5),
        ("attention.head_count", [1, 2]),
        ("attention.head_count", U32(0)),
        ("attention.head_count", [0, 0, 0, 0, 0, 0, 0, 0]),
        ("attention.head_count_kv", -1),
        ("attention.key_length", U32((1 << 32) - 1)),
        ("nextn_predict_layers", U32(8)),
        ("expert_count", 0.5),
    ],
)
def test_impossible_hyperparameters_name_their_key(facts: Facts, key: str, bad: object) -> None:
    with pytest.raises(ModelFileError, match=f"llama.{key}"):
        on_device(facts(small_dense(keys={key: bad})), ALL)


@pytest.mark.parametrize("missing", ["embedding_length", "block_count", "attention.head_count"])
def test_missing_keys_are_named(tmp_path: Path, missing: str) -> None:
    shape = small_dense()
    shape = replace(shape, keys={key: item for key, item in shape.keys.items() if key != missing})
    with pytest.raises(ModelFileError, match=rf"llama\.{missing} is (0 or )?missing"):
        MemoryModel(read_header(write(tmp_path / "m.gguf", shape)))


def test_a_model_without_attention_needs_no_heads(facts: Facts) -> None:
    shape = recurrent_shapes.mamba2(layers=4)
    ledger = on_device(facts(shape), ALL)
    assert ledger.devices[0].kv_cache_bytes == 0
    assert ledger.devices[0].state_bytes == 4 * 4 * (3 * (4096 + 2 * 128) + 128 * 4096)


# Cells of 8,192 tokens: (layers, cells, elements of K and V together) of each kind of cache, and state elements.
CACHES: dict[str, tuple[Callable[[], Shape], tuple[tuple[int, int, int], ...], int]] = {
    # The last 18 of 42 layers have none of their own; a window of 512 and a batch of 512.
    "gemma4": (further_shapes.gemma4, ((4, 8192, 2 * 2 * 512), (20, 1024, 2 * 2 * 256)), 0),
    "gemma4, a mixture": (further_shapes.gemma4_mixture, ((5, 8192, 2 * 2 * 512), (25, 1536, 2 * 8 * 256)), 0),
    "lfm2moe": (recurrent_shapes.lfm2moe, ((6, 8192, 2 * 8 * 64),), 18 * 2 * 2048),
    "nemotron_h_moe": (
        recurrent_shapes.nemotron_h_moe,
        ((6, 8192, 2 * 2 * 128),),
        23 * (3 * (4096 + 2 * 8 * 128) + 128 * 4096),
    ),
    "kimi-linear": (
        recurrent_shapes.kimi_linear,
        ((7, 8192, 576),),
        20 * (3 * 3 * 32 * 128 + 32 * 128 * 128),
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_what_a_family_keeps(facts: Facts, name: str) -> None:
    build, kinds, state = CACHES[name]
    device = on_device(facts(build()), replace(ALL, context_per_request=8192)).devices[0]
    assert device.kv_cache_bytes == sum(layers * cells * elements * 2 for layers, cells, elements in kinds)
    assert device.state_bytes == 4 * state


# --- against the engine -------------------------------------------------------------------------------------------

# Every tensor is below 128 MiB, the largest that a software Vulkan device takes.
CONFIGURATIONS: dict[str, tuple[Callable[[], Shape], Placement]] = {
    "dense": (small_dense, replace(ALL, kv_cache_k=KVType.Q8_0, kv_cache_v=KVType.Q8_0, parallel=2)),
    "dense, some layers": (lambda: small_dense(architecture="qwen3", tied=True), replace(BASE, gpu_layers=4)),
    "mixture, some experts in RAM": (small_mixture, replace(ALL, cpu_moe_layers=3, context_per_request=8192)),
    "hybrid, some experts in RAM": (small_hybrid, replace(ALL, cpu_moe_layers=5, parallel=3)),
    "windows": (lambda: shapes.gemma3(layers=6, vocabulary=32000), replace(ALL, context_per_request=16384)),
}


def close(own_bytes: int, engine_bytes: int) -> bool:
    """Within 1 % or the MiB that the engine rounds each of its rows to."""
    return abs(own_bytes - engine_bytes) <= max(engine_bytes // 100, 3 * MIB // 2)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_engine_counts_the_same_on_a_device(native_engine: Path | None, tmp_path: Path, name: str) -> None:
    if native_engine is None:
        pytest.skip("no native engine")
    build, placement = CONFIGURATIONS[name]
    model = write(tmp_path / "model.gguf", build())
    rows = accounting(native_engine, model, placement, device=True)
    devices = [row for row in rows if row not in ("Host", "CPU_REPACK")]
    if not devices:
        pytest.skip("the native engine sees no device, not even a software one")
    ledger = estimate(read_header(model), placement, device_names=devices)
    own, engine = ledger.devices[0], rows[devices[0]]
    assert close(own.weights_bytes + own.experts_bytes, engine["model"])
    assert close(own.kv_cache_bytes + own.state_bytes, engine["context"])
    assert -0.01 <= own.total_bytes / sum(engine.values()) - 1 <= 0.06
    assert close(ledger.host.weights_bytes + ledger.host.experts_bytes, rows["Host"]["model"])
    assert close(ledger.host.kv_cache_bytes + ledger.host.state_bytes, rows["Host"]["context"])


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (small_dense, {"tensor_split": (4.0, 5.0)}),
        (small_dense, {"tensor_split": (2.0, 3.0), "gpu_layers": 5}),
        (middle_mixture, {"tensor_split": (7.0, 6.0), "cpu_moe_layers": 2}),
        (middle_hybrid, {"tensor_split": (5.0, 6.0, 6.0), "context_per_request": 8192}),
    ],
)
def test_the_engine_counts_the_same_on_several_devices(
    native_engine: Path | None, tmp_path: Path, build: Callable[[], Shape], changes: dict[str, Any]
) -> None:
    if native_engine is None:
        pytest.skip("no native engine")
    model = write(tmp_path / "model.gguf", build())
    placement = replace(ALL, **changes)
    count = len(placement.tensor_split)
    rows = accounting(
        native_engine, model, placement, device=True, environment={"GGML_VK_VISIBLE_DEVICES": ",".join("0" * count)}
    )
    devices = [row for row in rows if row not in ("Host", "CPU_REPACK")]
    if len(devices) != count:
        pytest.skip("the native engine does not see a software device twice")
    ledger = estimate(read_header(model), placement, device_names=devices)
    for own in ledger.devices:
        engine = rows[own.name]
        assert close(own.weights_bytes + own.experts_bytes, engine["model"])
        assert close(own.kv_cache_bytes + own.state_bytes, engine["context"])
        assert -0.01 <= own.total_bytes / sum(engine.values()) - 1 <= 0.06
    assert close(ledger.host.compute_bytes, rows["Host"]["compute"])


@pytest.mark.parametrize("build", [small_dense, small_mixture, small_hybrid])
def test_the_engine_counts_the_same_without_a_device(
    native_engine: Path | None, tmp_path: Path, build: Callable[[], Shape]
) -> None:
    if native_engine is None:
        pytest.skip("no native engine")
    model = write(tmp_path / "model.gguf", build())
    rows = accounting(native_engine, model, BASE, device=False)
    host = estimate(read_header(model), BASE, device_names=[]).host
    assert rows
    assert close(host.weights_bytes + host.experts_bytes, sum(row["model"] for row in rows.values()))
    assert close(host.kv_cache_bytes + host.state_bytes, sum(row["context"] for row in rows.values()))
    assert -0.01 <= host.needed_bytes / sum(sum(row.values()) for row in rows.values()) - 1 <= 0.06


@pytest.mark.parametrize(
    ("text", "projector"),
    [
        (shapes.gemma3, projector_shapes.siglip()),
        (shapes.gemma3, projector_shapes.siglip(blocks=4, width=768, feed_forward=3072, image=448)),
        (shapes.qwen35, projector_shapes.qwen3vl()),
        (shapes.qwen35, projector_shapes.qwen3vl(blocks=12, width=768, feed_forward=3072)),
    ],
)
def test_the_engine_counts_the_same_for_a_projector(
    native_engine: Path | None, tmp_path: Path, text: Callable[..., Shape], projector: Shape
) -> None:
    if native_engine is None:
        pytest.skip("no native engine")
    facts = read_header(write(tmp_path / "text.gguf", text(layers=4, vocabulary=32000)))
    mmproj = read_header(write(tmp_path / "mmproj.gguf", projector))
    machine = Machine((), 32 << 30, 30 << 30, threads=2)
    plan = plan_offload(facts, machine, Wish(context=1024), mmproj=mmproj)
    probe = ask_accounting(plan, find_engine(str(native_engine)), environment=child_environment(os.environ))
    assert probe.accounting is not None, probe.finding
    own = MemoryModel(facts, mmproj=mmproj).mmproj_bytes
    # On a CPU the engine takes a little less than on a device, which is what the bound is for.
    assert -0.01 <= own / (probe.accounting.mmproj_bytes or 1) - 1 <= 0.12
