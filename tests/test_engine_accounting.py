"""An engine is asked what a plan takes before it reads weights; whatever it does instead is a finding."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from app.engine.accounting import AccountingReport, ask_accounting
from app.engine.binary import EngineBinary, find_engine
from app.engine.environment import child_environment
from app.engine.flags import FLAGS
from app.gguf import read_header
from app.hardware import Device, Machine
from app.memory import AccountedMemory
from app.offload import OffloadPlan, Wish, plan_offload
from tests import projector_shapes, shapes
from tests.gguf_writer import write

MIB = 1 << 20
GIB = 1 << 30

ROWS = [
    {"kind": "device", "name": "CUDA0", "description": "a card", "model": 6087, "context": 402, "compute": 476},
    {"kind": "host", "name": "Host", "model": 14090, "context": 0, "compute": 48},
    {"kind": "buffer_type", "name": "CPU_REPACK", "model": 10, "context": 0, "compute": 0},
]
TABLE = """\
0.00.172 I srv    load_model: [mtmd] estimated worst-case memory usage of mmproj is 958.94 MiB (took 62.96 ms)
0.00.196 I common_memory_breakdown_print: | memory breakdown [MiB]   | total    free     self   model   context   compute    unaccounted |
0.00.196 I common_memory_breakdown_print: |   - CUDA0 (RTX (8 GB, x)) |  8188 =  7600 + ( 6965 =  6087 +     402 +     476) +       -6377 |
0.00.196 I common_memory_breakdown_print: |   - Host                  |                  14138 = 14090 +       0 +      48                |
0.00.196 I common_memory_breakdown_print: |   - CPU_REPACK            |                     10 =    10 +       0 +       0                |
0.00.198 I common_params_fit_impl: projected to use 6965 MiB of device memory vs. 7600 MiB of free device memory
0.00.199 I common_memory_breakdown_print: |   - Host                  |                  99999 = 99999 +       0 +      48                |
"""  # noqa: E501
CARD = AccountedMemory("CUDA0", 6087 * MIB, 402 * MIB, 476 * MIB)
RAM = AccountedMemory("host", 14100 * MIB, 0, 48 * MIB)


def heard(lines: list[str]) -> AccountingReport:
    report = AccountingReport("an engine")
    for line in lines:
        if report.feed(line):
            break
    return report


# --- what engines print -------------------------------------------------------------------------------------------


def test_the_event_of_new_builds() -> None:
    event = json.dumps({"type": "fit_memory_breakdown", "data": {"unit": "MiB", "rows": ROWS}})
    accounting = heard([json.dumps({"type": "log", "msg": "hello\n"}), event]).accounting()
    assert accounting is not None
    assert (accounting.devices, accounting.host, accounting.mmproj_bytes) == ((CARD,), RAM, None)


def test_the_table_of_older_builds_is_the_first_one() -> None:
    accounting = heard(TABLE.splitlines()).accounting()
    assert accounting is not None
    assert (accounting.devices, accounting.host) == ((CARD,), RAM)
    assert accounting.mmproj_bytes == pytest.approx(958.94 * MIB, abs=1)


def test_the_table_inside_json_lines() -> None:
    lines = [json.dumps({"type": "log", "msg": line + "\n"}) for line in TABLE.splitlines()]
    accounting = heard(lines).accounting()
    assert accounting is not None
    assert (accounting.devices, accounting.host) == ((CARD,), RAM)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"type": "fit_memory_breakdown"}',
        '{"type": "fit_memory_breakdown", "data": {"rows": [1, {"kind": "device"}]}}',
        '{"type": "fit_memory_breakdown", "data": {"rows": [{"kind": "host", "name": "H", "model": "x"}]}}',
        "common_memory_breakdown_print: | nonsense",
    ],
)
def test_odd_lines_are_no_accounting(line: str) -> None:
    assert heard([line]).accounting() is None


def test_it_listens_no_longer_than_until_weights_are_read() -> None:
    assert AccountingReport("x").feed(
        "load_tensors: loading model tensors, this can take a while... (load_mode = mmap)"
    )


# --- real engines -------------------------------------------------------------------------------------------------


def plan_for(path: Path, *devices: Device, context: int = 4096) -> OffloadPlan:
    machine = Machine(devices, 32 * GIB, 30 * GIB, threads=2)
    return plan_offload(read_header(path), machine, Wish(context=context))


def environment(**extra: str) -> dict[str, str]:
    return child_environment(os.environ) | {"GGML_VK_VISIBLE_DEVICES": "0"} | extra


def test_both_engines_account_for_the_demo_model(engine: str, demo_model: Path) -> None:
    plan = plan_for(demo_model)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    probe = ask_accounting(plan, find_engine(engine), environment=environment())
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert probe.finding is None
    assert probe.accounting is not None
    host = plan.memory.host
    assert probe.accounting.devices == ()
    assert probe.accounting.host.weights_bytes == pytest.approx(host.weights_bytes, abs=3 * MIB)
    assert probe.accounting.host.context_bytes == pytest.approx(host.kv_cache_bytes, abs=2 * MIB)


def test_a_projector_is_counted_apart(native_engine: Path | None, tmp_path: Path) -> None:
    if native_engine is None:
        pytest.skip("no native llama-server on this machine; deploy/native-engine-debian.sh installs one")
    model = write(tmp_path / "text.gguf", shapes.gemma3(layers=6, vocabulary=32000))
    projector = read_header(write(tmp_path / "mmproj.gguf", projector_shapes.siglip(blocks=2)))
    plan = replace(plan_for(model), mmproj=projector)
    probe = ask_accounting(plan, find_engine(str(native_engine)), environment=environment())
    assert probe.accounting is not None, probe.finding
    assert (probe.accounting.mmproj_bytes or 0) > sum(tensor.size_bytes for tensor in projector.tensors)


def test_a_damaged_model_is_a_finding(native_engine: Path | None, demo_model: Path, tmp_path: Path) -> None:
    if native_engine is None:
        pytest.skip("no native llama-server on this machine; deploy/native-engine-debian.sh installs one")
    plan = plan_for(demo_model)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    plan = replace(plan, model=replace(plan.model, path=broken))
    probe = ask_accounting(plan, find_engine(str(native_engine)), environment=environment())
    assert probe.accounting is None
    assert "did not account for its memory: encountered an error" in (probe.finding or "")


# --- engines that misbehave ---------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], EngineBinary]:
    known = frozenset(spelling for flag in FLAGS.values() for spelling in flag.spellings)

    def build(body: str) -> EngineBinary:
        path = tmp_path / "engine"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return EngineBinary((str(path),), "native", path, "1", 1, known, "", known)

    return build


def test_a_crash_is_a_finding(script: Callable[[str], EngineBinary], demo_model: Path) -> None:
    probe = ask_accounting(plan_for(demo_model), script("kill -SEGV $$"), environment=environment())
    assert probe.accounting is None
    assert "crashed" in (probe.finding or "")


def test_silence_is_a_finding_in_time(script: Callable[[str], EngineBinary], demo_model: Path) -> None:
    begin = time.monotonic()
    probe = ask_accounting(
        plan_for(demo_model), script("sleep 60 & sleep 60"), environment=environment(), timeout_seconds=0.3
    )
    assert time.monotonic() - begin < 5
    assert probe.accounting is None
    assert "no progress" in (probe.finding or "")


def test_a_server_that_just_starts_is_not_waited_for(script: Callable[[str], EngineBinary], demo_model: Path) -> None:
    begin = time.monotonic()
    started = script("echo 'srv  llama_server: model loaded'; sleep 60")
    probe = ask_accounting(plan_for(demo_model), started, environment=environment(), timeout_seconds=20)
    assert time.monotonic() - begin < 10
    assert probe.accounting is None
    assert probe.finding


def test_what_is_asked_is_what_would_be_loaded(
    script: Callable[[str], EngineBinary], demo_model: Path, tmp_path: Path
) -> None:
    asked = script(f'printf "%s\\n" "$@" > {tmp_path}/asked; exit 3')
    plan = plan_for(demo_model, Device("CUDA0", "", 8 * GIB, 8 * GIB))
    ask_accounting(plan, asked, environment=environment())
    arguments = (tmp_path / "asked").read_text().splitlines()
    assert arguments[arguments.index("--fit") + 1] == "on"
    assert arguments[arguments.index("--n-gpu-layers") + 1] == str(plan.placement.gpu_layers)
    # It listens in a private folder that is gone afterwards, and opens no port.
    assert not Path(arguments[arguments.index("--host") + 1]).parent.exists()
    assert "--port" not in arguments


def test_an_engine_without_fit_is_not_started(script: Callable[[str], EngineBinary], demo_model: Path) -> None:
    old = script("exit 1")
    old = replace(old, flags=old.flags - {"--fit", "-fit"})
    finding = ask_accounting(plan_for(demo_model), old, environment=environment()).finding
    assert finding is not None
    assert "cannot account for memory before it loads" in finding


def test_a_program_that_is_gone_is_a_finding(script: Callable[[str], EngineBinary], demo_model: Path) -> None:
    gone = script("exit 0")
    gone.path.unlink()
    assert ask_accounting(plan_for(demo_model), gone, environment=environment()).finding
