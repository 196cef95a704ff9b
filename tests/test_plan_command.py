"""``llama-gateway plan``: what a person sees, with reasons, memory, the engine's word, and what would fit instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli.drawing import explanation, offers
from app.cli.plan import PlanRequest, print_plan
from app.errors import ConfigError, DoesNotFit, EngineUnusable
from app.gguf import read_header
from app.hardware import Device, Machine
from app.offload import Wish, plan_offload
from app.offload.alternatives import Alternative, alternatives, requantised
from tests import shapes
from tests.gguf_writer import write

MIB = 1 << 20
GIB = 1 << 30

Request = Callable[..., PlanRequest]


@pytest.fixture(scope="module")
def a3b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "Qwen3.6-35B-A3B-Q4_K_M.gguf", shapes.qwen35moe())


@pytest.fixture(scope="module")
def dense32b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"layers": 64, "embedding": 5120, "heads": 64, "feed_forward": 25600, "vocabulary": 151936}
    shape = shapes.dense(architecture="qwen3", **sizes)
    return write(tmp_path_factory.mktemp("models") / "Qwen3-32B-Q4_K_M.gguf", shape)


def asked(file: Path, **changes: Any) -> PlanRequest:
    defaults = PlanRequest(
        file=file,
        mmproj=None,
        vram="7600MiB",
        ram="30GiB",
        context=32768,
        parallel=1,
        kv_cache="auto",
        engine="/nowhere/llama-server",
    )
    return replace(defaults, **changes)


def machine(*free_mib: int, ram_gib: int = 30) -> Machine:
    devices = tuple(Device(f"GPU{number}", "", mib * MIB, mib * MIB) for number, mib in enumerate(free_mib))
    return Machine(devices, (ram_gib + 2) * GIB, ram_gib * GIB, threads=8)


# --- --explain ----------------------------------------------------------------------------------------------------


def test_explain_has_reasons_a_table_and_bars(a3b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(asked(a3b, explain=True), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r" +cpu_moe_layers 30 +the fewest layers", line) for line in lines)
    table = {line.split("  ")[1]: re.findall(r"-?[\d,]+", line) for line in lines if line.startswith("  ")}
    assert table["weights"] == ["1,305", "273"]
    assert table["reserve"] == ["512", "2,048"]
    device = next(line for line in lines if re.match(r" +CUDA0 +\[", line))
    drawn = device[device.index("[") + 1 : device.index("]")]
    assert len(drawn) == 60
    assert re.fullmatch(r"W+E+K+C+\.?r+", drawn)
    assert device.endswith("7,600 MiB free")


def test_the_bar_is_in_proportion(a3b: Path) -> None:
    plan = plan_offload(read_header(a3b), machine(7600), Wish(context=32768))
    device = plan.memory.devices[0]
    bar = next(line for line in explanation(plan) if line.startswith("  GPU0"))
    assert bar.count("E") == pytest.approx(60 * device.experts_bytes / (7600 * MIB), abs=1)
    assert bar.count("r") == pytest.approx(60 * 512 / 7600, abs=1)


def test_a_ledger_that_is_too_large_is_drawn_as_such(a3b: Path) -> None:
    plan = plan_offload(read_header(a3b), machine(7600), Wish(context=32768))
    smaller = replace(plan.machine, devices=(replace(plan.machine.devices[0], free_bytes=6000 * MIB),))
    bar = next(line for line in explanation(replace(plan, machine=smaller)) if line.startswith("  GPU0"))
    assert "MiB over" in bar
    assert bar.index("]") - bar.index("[") == 61


def test_two_cards_and_none(a3b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(asked(a3b, vram="8GiB,12GiB", explain=True), as_json=False)
    output = capsys.readouterr().out
    assert "CUDA1 [" in output
    assert "tensor_split" in output
    print_plan(asked(a3b, vram="0", explain=True), as_json=False)
    output = capsys.readouterr().out
    assert "CUDA" not in output
    assert "on the CPU with" in output


def test_a_20_gb_file_is_planned_in_three_tenths_of_a_second(tmp_path: Path) -> None:
    path = write(tmp_path / "words.gguf", shapes.qwen35moe(), words=True)
    assert path.stat().st_size > 20e9
    seconds = []
    for _ in range(3):
        # Of this process, not of the clock: other work on the machine is no plan's fault.
        begin = time.process_time()
        plan_offload(read_header(path), machine(7600, 11500), Wish(context=32768))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.2


# --- what would fit instead ---------------------------------------------------------------------------------------


def offered(facts: Path, on: Machine, wish: Wish) -> dict[str, Alternative]:
    return {offer.setting: offer for offer in alternatives(read_header(facts), on, wish)}


def test_16384_tokens_at_22_layers(dense32b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wish = Wish(context=16384, gpu_layers=22)
    found = offered(dense32b, machine(7600), wish)
    assert {"context", "gpu_layers", "offload", "model"} <= found.keys()
    facts = read_header(dense32b)
    # Each offer fits, and a little more of it does not.
    context, layers = int(found["context"].value), int(found["gpu_layers"].value)
    plan_offload(facts, machine(7600), replace(wish, context=context))
    plan_offload(facts, machine(7600), replace(wish, gpu_layers=layers))
    for more in (replace(wish, context=context + 256), replace(wish, gpu_layers=layers + 1)):
        with pytest.raises(DoesNotFit):
            plan_offload(facts, machine(7600), more)
    with pytest.raises(DoesNotFit):
        print_plan(asked(dense32b, context=16384, gpu_layers=22), as_json=False)
    assert f"gpu_layers {layers}" in capsys.readouterr().err


def test_a_model_that_is_too_large_for_the_ram_is_offered_in_fewer_bits(a3b: Path) -> None:
    on, wish = machine(7600, ram_gib=12), Wish(context=32768)
    with pytest.raises(DoesNotFit):
        plan_offload(read_header(a3b), on, wish)
    found = offered(a3b, on, wish)
    assert re.fullmatch(r"Q3_K_\w, about 1[3-6]\.\d GiB", found["model"].value)
    gib = int(found["free RAM"].value.split()[0])
    plan_offload(read_header(a3b), machine(7600, ram_gib=gib), wish)
    with pytest.raises(DoesNotFit):
        plan_offload(read_header(a3b), machine(7600, ram_gib=gib - 1), wish)


def test_fewer_experts_on_the_device_are_offered(a3b: Path) -> None:
    found = offered(a3b, machine(7600), Wish(context=32768, kv_cache="q8_0", cpu_moe_layers=3))
    assert found["cpu_moe_layers"].value == "30"
    assert found["offload"].value == "auto"


def test_fewer_requests_and_a_compact_cache_are_offered(a3b: Path) -> None:
    found = offered(a3b, machine(ram_gib=30), Wish(context=131072, parallel=8, kv_cache="f16"))
    assert 1 <= int(found["parallel"].value) < 8
    assert found["kv_cache"].value in ("q8_0", "q4_0")


def test_nothing_is_offered_where_nothing_helps(a3b: Path) -> None:
    assert list(offers([])) == ["No single change makes it fit."]
    tiny = machine(ram_gib=1)
    assert set(offered(a3b, tiny, Wish(context=4096))) <= {"free RAM"}


def test_fewer_bits_leave_vectors_alone(dense32b: Path) -> None:
    facts = read_header(dense32b)
    half = requantised(facts, 0.5)
    assert half.file_bytes == pytest.approx(facts.file_bytes / 2, rel=0.01)
    assert half.parameters == facts.parameters
    norms = [tensor.size_bytes for tensor in half.tensors if tensor.name.endswith("norm.weight")]
    assert norms == [tensor.size_bytes for tensor in facts.tensors if tensor.name.endswith("norm.weight")]


# --- --verify, --json, exit codes ---------------------------------------------------------------------------------


def test_verify_asks_the_engine(engine: str, demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = asked(demo_model, vram="0", ram="8GiB", context=2048, engine=engine, verify=True)
    print_plan(request, as_json=True)
    document = json.loads(capsys.readouterr().out)
    verified = document["verified"]
    assert verified["by"].startswith("llama-server " if engine != "embedded" else "xllamacpp ")
    assert verified["devices"] == []
    assert verified["host"]["total_bytes"] == pytest.approx(verified["host"]["planned_bytes"], rel=0.02)
    print_plan(replace(request, explain=True), as_json=False)
    assert "the engine says" in capsys.readouterr().out


def test_verify_without_an_engine_says_what_is_missing(a3b: Path) -> None:
    with pytest.raises(EngineUnusable, match="--verify needs an engine"):
        print_plan(asked(a3b, verify=True), as_json=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vram": "much"}, "--vram 'much'"),
        ({"ram": "-"}, "--ram '-'"),
        ({"kv_cache": "q9"}, "--kv-cache q9"),
        ({"kind": "x"}, "--kind x"),
    ],
)
def test_arguments_that_make_no_sense(a3b: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        print_plan(asked(a3b, **changes), as_json=False)


def test_a_refusal_is_exit_code_3_with_numbers_and_offers(dense32b: Path) -> None:
    arguments = ["plan", str(dense32b), "--vram", "7600MiB", "--ram", "12GiB", "--context", "4096"]
    done = subprocess.run([sys.executable, "-m", "app", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "What would fit instead" in done.stderr
    assert "llama-gateway: Qwen3-32B-Q4_K_M needs" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_wrong_kind_of_file(tmp_path: Path) -> None:
    page = tmp_path / "model.gguf"
    page.write_text("<!DOCTYPE html><html>Sign in</html>")
    done = subprocess.run([sys.executable, "-m", "app", "plan", page], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "is a web page, not a model" in done.stderr
    assert "Traceback" not in done.stderr
