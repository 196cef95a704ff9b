"""Guessing ahead: a draft model or the model's own draft head is planned, counted by the engine, and used."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.engine.accounting import AccountingReport, ask_accounting
from app.engine.binary import EngineBinary, find_engine
from app.engine.command import Endpoint, build_argv
from app.engine.environment import child_environment
from app.engine.verify import PlanVerifier
from app.errors import EngineUnusable, ModelFileError
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine
from app.offload import OffloadPlan, Wish, plan_offload
from tests import shapes
from tests.bench.memory import build_shim
from tests.gateway import running_gateway
from tests.gguf_writer import write

MIB = 1 << 20
GIB = 1 << 30
NAME = "Vulkan0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def large(folder: Path) -> ModelFacts:
    return read_header(write(folder / "large.gguf", shapes.dense()))


@pytest.fixture(scope="module")
def small(folder: Path) -> ModelFacts:
    sizes: dict[str, Any] = {"layers": 16, "embedding": 2048, "head_length": 64, "feed_forward": 8192}
    return read_header(write(folder / "small.gguf", shapes.dense(**sizes, tied=True)))


@pytest.fixture(scope="module")
def with_head(folder: Path) -> ModelFacts:
    shape = shapes.qwen35moe(layers=12, experts=64, vocabulary=64000, draft_head=True)
    return read_header(write(folder / "head.gguf", shape))


def machine(*free_mib: int, ram_gib: int = 30) -> Machine:
    devices = tuple(Device(f"Vulkan{number}", "", mib * MIB, mib * MIB) for number, mib in enumerate(free_mib))
    return Machine(devices, 32 * GIB, ram_gib * GIB, threads=2)


# --- where it goes ------------------------------------------------------------------------------------------------


def test_a_draft_model_comes_last_and_never_costs_a_layer(large: ModelFacts, small: ModelFacts) -> None:
    alone = plan_offload(large, machine(7000), Wish())
    beside = plan_offload(large, machine(8000), Wish(), draft=small)
    assert (beside.placement.gpu_layers, beside.placement.draft_on) == (33, NAME)
    # 698 MiB of weights, 256 of cache, 72 of buffers: what the engine counts.
    assert beside.memory.devices[0].draft_bytes == pytest.approx(1026 * MIB, abs=2 * MIB)
    in_ram = plan_offload(large, machine(7000), Wish(), draft=small)
    assert (in_ram.placement.gpu_layers, in_ram.placement.draft_on) == (alone.placement.gpu_layers, "host")
    assert in_ram.memory.devices[0].draft_bytes == 0
    more = in_ram.memory.host.needed_bytes - alone.memory.host.needed_bytes
    assert more > sum(tensor.size_bytes for tensor in small.tensors)
    reasons = {reason.setting: reason.because for reason in in_ram.reasons}
    assert "push layers out" in reasons["draft_on"]


def test_the_second_device_takes_what_the_first_has_no_room_for(large: ModelFacts, small: ModelFacts) -> None:
    plan = plan_offload(large, machine(4000, 6000), Wish(), draft=small)
    assert plan.placement.gpu_layers == 33
    device = next(device for device in plan.memory.devices if device.draft_bytes)
    assert device.name == plan.placement.draft_on
    assert all(ledger.total_bytes <= device.free_bytes for ledger, device in zip(
        plan.memory.devices, plan.machine.devices, strict=True))  # fmt: skip


def test_without_a_device_it_is_in_ram(large: ModelFacts, small: ModelFacts) -> None:
    assert plan_offload(large, machine(), Wish(), draft=small).placement.draft_on == "host"


def test_a_draft_head_takes_its_weights_its_cache_and_more_state(with_head: ModelFacts) -> None:
    without = plan_offload(with_head, machine(8000), Wish()).memory.devices[0]
    plan = plan_offload(with_head, machine(8000), Wish(draft_head=True))
    device = plan.memory.devices[0]
    assert (plan.placement.draft_tokens, plan.placement.draft_on) == (3, None)
    assert device.state_bytes == 4 * without.state_bytes
    assert device.weights_bytes > without.weights_bytes
    assert device.experts_bytes > without.experts_bytes
    assert device.compute_bytes > without.compute_bytes


def test_a_head_that_is_not_there_is_said(large: ModelFacts) -> None:
    with pytest.raises(ModelFileError, match="no draft head of its own"):
        plan_offload(large, machine(8000), Wish(draft_head=True))


# --- in the words of an engine ------------------------------------------------------------------------------------

_COMMON = {
    "--model", "--alias", "--host", "--port", "--api-key-file", "--ctx-size", "--parallel", "--batch-size",
    "--ubatch-size", "--threads", "--threads-batch", "--n-gpu-layers", "--n-cpu-moe", "--tensor-split",
    "--cache-type-k", "--cache-type-v", "--flash-attn", "--mmproj", "--no-mmproj-offload", "--embedding", "--device",
}  # fmt: skip
# What help texts of August 2025, of spring 2026 and of today list of drafts.
_BEFORE = {"--model-draft", "--gpu-layers-draft", "--device-draft", "--draft-max", "--ctx-size-draft"}
_AFTER = {"--spec-draft-model", "--spec-draft-ngl", "--spec-draft-device", "--spec-draft-n-max", "--spec-type"}


def argv(plan: OffloadPlan, *flags: str) -> tuple[str, ...]:
    engine = EngineBinary((), "native", Path("llama-server"), "1", 1, frozenset({*_COMMON, *flags}), "")
    return build_argv(plan, engine, alias="x", endpoint=Endpoint(port=1), key_file=None)


def pairs(words: tuple[str, ...]) -> dict[str, str]:
    return dict(pairwise(words))


def test_each_generation_is_told_in_its_own_words(large: ModelFacts, small: ModelFacts) -> None:
    plan = plan_offload(large, machine(8000), Wish(parallel=2, context=4096), draft=small)
    old, new = pairs(argv(plan, *_BEFORE)), pairs(argv(plan, *_AFTER))
    assert old["--model-draft"] == new["--spec-draft-model"] == str(small.path)
    assert old["--gpu-layers-draft"] == new["--spec-draft-ngl"] == "17"
    assert old["--device-draft"] == new["--spec-draft-device"] == NAME
    assert old["--draft-max"] == new["--spec-draft-n-max"] == "3"
    # Left to itself an old engine takes as many cells as the draft was trained for.
    assert old["--ctx-size-draft"] == "8192"
    assert new["--spec-type"] == "draft-simple"
    in_ram = pairs(argv(plan_offload(large, machine(6600), Wish(), draft=small), *_AFTER))
    assert (in_ram["--spec-draft-ngl"], in_ram["--spec-draft-device"]) == ("0", "none")


def test_an_engine_that_cannot_is_refused(large: ModelFacts, small: ModelFacts, with_head: ModelFacts) -> None:
    with pytest.raises(EngineUnusable, match="take `draft` away"):
        argv(plan_offload(large, machine(8000), Wish(), draft=small))
    head = plan_offload(with_head, machine(8000), Wish(draft_head=True))
    assert pairs(argv(head, *_AFTER))["--spec-type"] == "draft-mtp"
    with pytest.raises(EngineUnusable, match="take `draft` away"):
        argv(head, *_BEFORE)


def test_the_table_of_the_draft_is_told_from_that_of_the_model_and_of_other_trials() -> None:
    row = "|   - {} (a card) | 8188 = 7600 + ( 1 = {} + 10 + 5) + -9 |"
    lines = [
        "common_memory_breakdown_print: " + row.format(NAME, 4000),
        "common_memory_breakdown_print: |   - Host | 3 = 1 + 1 + 1 |",
        "operator(): getting device memory data for the extra model at a context size of 8192:",
        "common_memory_breakdown_print: " + row.format(NAME, 700),
        "common_memory_breakdown_print: |   - Host | 3 = 1 + 1 + 1 |",
        "common_params_fit_impl: projected to use 1 MiB of device memory vs. 2 MiB of free device memory",
        "common_memory_breakdown_print: " + row.format(NAME, 9999),
    ]
    report = AccountingReport("x", draft=True)
    heard = [report.feed(line) for line in lines]
    assert heard.index(True) == 5
    accounting = report.accounting()
    assert accounting is not None
    assert accounting.draft is not None
    assert accounting.device(NAME).weights_bytes == 4000 * MIB
    assert accounting.draft.device(NAME).total_bytes == 715 * MIB
    # Of a head's own row only cache and buffers: its weights are the model's.
    report = AccountingReport("x", draft_head=True)
    assert [report.feed(line) for line in lines].index(True) == 5
    accounting = report.accounting()
    assert accounting is not None
    assert (accounting.device(NAME).weights_bytes, accounting.device(NAME).context_bytes) == (4000 * MIB, 20 * MIB)
    # An engine that does not account for the draft is not waited for.
    report = AccountingReport("x", draft=True)
    assert report.feed("0.1 I common_init_: fitting params to free memory took 0.2 s")


# --- as the engine counts it --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native(native_engine: Path | None, folder: Path) -> tuple[EngineBinary, Mapping[str, str]]:
    if native_engine is None or shutil.which("gcc") is None:
        pytest.skip("needs a native llama-server and gcc; deploy/native-engine-debian.sh and apt-get install gcc")
    extra = {"GGML_VK_VISIBLE_DEVICES": "0", "LD_PRELOAD": str(build_shim(folder))}
    return find_engine(str(native_engine)), child_environment(os.environ) | extra


@pytest.mark.parametrize(
    ("free_mib", "wish"),
    [(8000, Wish()), (8000, Wish(parallel=4, kv_cache="q8_0")), (8000, Wish(cpu_moe_layers=13)), (0, Wish())],
    ids=["all", "slots", "experts", "cpu"],
)
def test_a_head_is_counted_as_the_engine_counts_it(
    native: tuple[EngineBinary, Mapping[str, str]], with_head: ModelFacts, free_mib: int, wish: Wish
) -> None:
    engine, environment = native
    plan = plan_offload(with_head, machine(*[free_mib] * bool(free_mib)), replace(wish, draft_head=True))
    accounting = ask_accounting(plan, engine, environment=environment).accounting
    assert accounting is not None
    for device in plan.memory.devices:
        row = accounting.device(device.name)
        assert device.kv_cache_bytes + device.state_bytes == pytest.approx(row.context_bytes, abs=3 * MIB)
        assert device.weights_bytes + device.experts_bytes == pytest.approx(row.weights_bytes, abs=3 * MIB)
        assert 0.99 <= device.total_bytes / row.total_bytes <= 1.10
    assert plan.memory.host.needed_bytes == pytest.approx(accounting.host.total_bytes, rel=0.02, abs=3 * MIB)


def test_a_draft_model_is_confirmed_beside_its_model(
    native: tuple[EngineBinary, Mapping[str, str]], large: ModelFacts, small: ModelFacts
) -> None:
    engine, environment = native
    plan = PlanVerifier(engine, environment=environment).plan(large, machine(8000), Wish(), draft=small)
    assert plan.verified is not None
    assert (plan.verified.corrections, plan.placement.draft_on) == (0, NAME)
    verified = plan.document()["verified"]
    assert verified["draft_bytes"] == pytest.approx(plan.memory.devices[0].draft_bytes + 164 * MIB, abs=4 * MIB)
    assert verified["devices"][0]["planned_bytes"] == pytest.approx(verified["devices"][0]["total_bytes"], rel=0.01)


# --- and really used ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_are_the_same_and_guesses_are_made(
    native_engine: Path | None, demo_model: Path, tmp_path: Path
) -> None:
    """The model is its own draft: every guess is right."""
    if native_engine is None:
        pytest.skip("no native llama-server on this machine; deploy/native-engine-debian.sh installs one")
    common = {"path": str(demo_model), "context": 256, "max_tokens": 24}
    config = {
        "engine": {"binary": str(native_engine)},
        "memory": {"ram_reserve": "256MiB"},
        "models": {"plain": common, "guessing": {**common, "draft": str(demo_model)}},
    }
    body = {"messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0, "seed": 1}
    with running_gateway(config, tmp_path) as gateway:
        replies = [
            httpx.post(f"{gateway.url}/v1/chat/completions", json={"model": name, **body}, timeout=120).json()
            for name in ("plain", "guessing")
        ]
        plan = httpx.get(f"{gateway.url}/admin/models/guessing/plan").json()
        log = httpx.get(f"{gateway.url}/admin/models/guessing/logs").text
    plain, guessing = (reply["choices"][0]["message"]["content"] for reply in replies)
    assert guessing == plain
    accepted = re.search(r"draft acceptance = 1.0* \( *(\d+) accepted", log)
    assert accepted is not None
    assert int(accepted[1]) > 12
    assert plan["placement"]["draft_on"] == "host"
