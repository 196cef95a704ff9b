"""``llama-gateway doctor``: what is there, what is wrong, and what to do about it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.doctor import Findings, examine, report
from app.hardware import CPU_FEATURES, cpu_features


def script(folder: Path, body: str) -> Path:
    path = folder / "llama-server"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def problems(found: Findings) -> dict[str, str]:
    assert all(problem.cure.endswith(".") for problem in found.problems)
    return {problem.about: problem.finding for problem in found.problems}


def test_as_json_it_is_whole(engine: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app", "doctor", "--engine", engine, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LLAMA_ARG_CTX_SIZE": "4096"},
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert {"environment"} <= {problem["about"] for problem in found["problems"]}
    (used,) = found["engines"]
    assert used["chosen"] is True
    assert used["version"]
    assert used["flags"] > 40
    assert "--ctx-size" not in used["missing_flags"]
    assert found["threads"] >= 1
    assert found["ram_total_bytes"] >= found["ram_available_bytes"] > 0
    assert done.stderr == ""


def test_an_engine_that_does_not_work_is_the_first_problem(tmp_path: Path) -> None:
    found = examine(str(script(tmp_path, "kill -ILL $$")), environment={})
    assert "another CPU" in problems(found)["engine"]
    assert found.machine.devices == ()
    lines = list(report(found))
    assert any(line.startswith("problem  engine: ") for line in lines)
    assert lines[-1].startswith("         ")


def test_auto_says_what_each_engine_is_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = examine("auto", environment={})
    auto, native = found.engines
    assert (auto.chosen, auto.failure) == (True, None)
    assert native.chosen is False
    assert "exit code 3" in (native.failure or "")
    assert "exit code 3" in problems(found)["engine"]


def test_an_old_engine_is_said_to_be_one(tmp_path: Path) -> None:
    old = script(
        tmp_path,
        'case "$1" in --version) echo "version: 6000 (abc)" >&2;; '
        '--help) echo "-c, --ctx-size N  size"; echo "-m, --model FILE  model";; esac',
    )
    found = examine(str(old), environment={})
    assert "too old" in problems(found)["engine"]
    assert "--n-cpu-moe" in found.engines[0].missing_flags
    assert any("without" in line and "--fit" in line for line in report(found))


def test_a_configuration_of_the_engine_itself_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config/llama.cpp").mkdir(parents=True)
    (tmp_path / ".config/llama.cpp/config.ini").write_text("ctx-size = 1\n")
    found = examine(str(script(tmp_path, "exit 1")), environment={})
    assert "config.ini" in problems(found)["environment"]


def test_features_of_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor: 0\nflags\t\t: fpu avx avx2 fma\nbugs: x\n")
    assert cpu_features(root=tmp_path) == ("AVX", "FMA", "AVX2")
    assert set(cpu_features()) <= set(CPU_FEATURES)
    (tmp_path / "proc/cpuinfo").write_text("Features: asimd\n")
    assert cpu_features(root=tmp_path) == ()
