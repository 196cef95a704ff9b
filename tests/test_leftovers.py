"""Whatever ends the gateway, no engine outlives it; what a crash leaves is cleaned by the next start, and only that."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from app.engine.records import INSTANCE_VARIABLE, end_orphans, write_record
from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, is_alive, running_gateway, wait_until

BODY = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 400}


def config(folder: Path, model: Path, *, engine: Path | None = None) -> dict[str, Any]:
    return {
        "engine": {"binary": str(engine or fake_binary(folder))},
        "memory": {"ram_reserve": 0},
        "server": {"drain_seconds": 0.5},
        "models": {"a": {"path": str(model), "context": 512}},
    }


def started_engines(folder: Path) -> list[int]:
    file = folder / "starts"
    return [int(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []


def ask(url: str) -> threading.Thread:
    def run() -> None:
        try:
            with httpx.Client(timeout=20) as client:
                client.post(f"{url}/v1/chat/completions", json=BODY)
        except httpx.HTTPError:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def reach(moment: str, gateway: GatewayProcess, folder: Path) -> None:
    """Bring the gateway to this moment of its life."""
    if moment == "start":
        return
    url = gateway.url
    if moment == "idle":
        ask(url).join()
        return
    ask(url)
    wait_until(lambda: started_engines(folder), seconds=10, what="an engine starts")
    if moment in ("stream", "drain"):
        busy = 'llama_gateway_slots{model="a",state="busy"} 1.0'
        wait_until(lambda: busy in httpx.get(f"{url}/metrics").text, seconds=10, what="an answer is under way")
    if moment == "drain":
        gateway.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 503, seconds=2, what="it drains")


def gone_within_a_second(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), seconds=1, what="the engines are gone")


MOMENTS = ["start", "idle", "load", "stream", "drain"]
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
# The likeliest to go wrong is always run, each of the fifteen among the slow tests, and twice in the long run.
_CASES = [
    pytest.param(number, moment, rounds, id=f"{number.name}-{moment}-{rounds}", marks=marks)
    for number in SIGNALS
    for moment in MOMENTS
    for rounds, marks in ((1, pytest.mark.slow), (2, pytest.mark.long))
] + [pytest.param(signal.SIGKILL, "stream", 1, id="SIGKILL-stream")]


@pytest.mark.parametrize(("number", "moment", "rounds"), _CASES)
def test_nothing_outlives_the_gateway(
    demo_model: Path, tmp_path: Path, number: signal.Signals, moment: str, rounds: int
) -> None:
    switches = {"chunks": 1000, "chunk_interval_seconds": 0.02} if moment in ("stream", "drain") else {}
    switches |= {"load_seconds": 5} if moment == "load" else {}
    (tmp_path / "a.json").write_text(json.dumps(switches))
    environment = {"FAKE_SWITCHES": str(tmp_path)}
    for _ in range(rounds):
        with running_gateway(config(tmp_path, demo_model), tmp_path, environment=environment) as gateway:
            reach(moment, gateway, tmp_path)
            time.sleep(random.random() * 0.1)
            pids = [*gateway.engine_pids(), *started_engines(tmp_path)]
            gateway.process.send_signal(number)
            code = gateway.process.wait(10)
            gone_within_a_second(pids)
            if number is not signal.SIGKILL and moment != "start":
                assert code == 0
    # The next one comes up all the same, and takes what is left of the records along.
    (tmp_path / "a.json").unlink()
    began = time.monotonic()
    with running_gateway(config(tmp_path, demo_model), tmp_path, environment=environment) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY | {"stream": False}, timeout=20)
        assert answer.status_code == 200
        # A machine that is busy with other tests needs several times as long as an idle one.
        assert time.monotonic() - began < 20
        assert len(list((gateway.state_dir / "engines").iterdir())) == 1
    assert list((tmp_path / "state" / "engines").iterdir()) == []


def forking(folder: Path) -> Path:
    """An engine that starts a process in a session of its own, which no signal to its group reaches."""
    program = folder / "forking"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--alias*) setsid sleep 300 >/dev/null 2>&1 & echo $! >{folder}/grandchild;; esac\n'
        f'exec {fake_binary(folder)} "$@"\n'
    )
    program.chmod(0o755)
    return program


def test_a_process_that_the_engine_started_goes_too(demo_model: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, demo_model, engine=forking(tmp_path))
    with running_gateway(settings, tmp_path) as gateway:
        ask(gateway.url).join()
        grandchild = int((tmp_path / "grandchild").read_text())
        assert is_alive(grandchild)
        assert gateway.stop() == 0
    wait_until(lambda: not is_alive(grandchild), seconds=1, what="the grandchild is gone")


@pytest.mark.slow
def test_a_process_that_survived_a_kill_is_ended_by_the_next_gateway(demo_model: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, demo_model, engine=forking(tmp_path))
    with running_gateway(settings, tmp_path) as gateway:
        ask(gateway.url).join()
        grandchild = int((tmp_path / "grandchild").read_text())
        gateway.kill()
    assert is_alive(grandchild)
    # Another gateway, with another state folder, leaves it alone.
    with running_gateway(settings, tmp_path / "other") as other:
        assert other.url
        assert is_alive(grandchild)
    with running_gateway(settings, tmp_path) as gateway:
        assert gateway.url
        assert not is_alive(grandchild)
        assert any(f"ended process {grandchild}" in line for line in gateway.log)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process
        process.kill()


def test_a_record_ends_its_own_process_and_no_later_one(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    file = write_record(tmp_path, pid=bystander.pid, name="a")
    assert file is not None
    record = json.loads(file.read_text())
    # The number was given to another process since, or the machine was started again.
    for change in ({"started": record["started"] - 1}, {"boot": "another"}, {"pid": os.getpid()}):
        file.write_text(json.dumps(record | change))
        assert end_orphans(tmp_path, instance="nobody") == []
        assert bystander.poll() is None
    (tmp_path / "half.json").write_text('{"pid": 1')
    (tmp_path / "strange.json").write_text("[]")
    file.write_text(json.dumps(record))
    assert end_orphans(tmp_path, instance="nobody") == [bystander.pid]
    assert not is_alive(bystander.pid)
    assert list(tmp_path.iterdir()) == []


def test_only_our_own_mark_counts(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"]
    mine, other = (
        subprocess.Popen(sleep, env={**os.environ, INSTANCE_VARIABLE: name}, stdout=subprocess.PIPE)
        for name in ("/state/mine", "/state/mine-too")
    )
    with mine, other:
        for process in (mine, other):
            assert process.stdout is not None
            process.stdout.readline()
        assert end_orphans(tmp_path, instance="/state/mine") == [mine.pid]
        assert other.poll() is None
        other.kill()


@pytest.mark.slow
def test_a_second_gateway_on_the_same_state_folder_refuses(demo_model: Path, tmp_path: Path) -> None:
    with running_gateway(config(tmp_path, demo_model), tmp_path) as gateway:
        assert gateway.url
        second = subprocess.run(
            [sys.executable, "-m", "app", "serve", "--config", str(tmp_path / "config.yaml")],
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert second.returncode == 2
        *_, said = second.stderr.strip().splitlines()
        assert said.startswith(f"llama-gateway: Another gateway (process {gateway.pid}) uses the state folder")
        assert "LLAMA_GATEWAY_STATE_DIR" in said
        assert httpx.get(f"{gateway.url}/readyz").status_code == 200


def test_a_state_folder_that_cannot_be_written(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path, demo_model) | {"state_dir": "/proc/nowhere"}))
    refused = subprocess.run(
        [sys.executable, "-m", "app", "serve", "--config", str(file)], capture_output=True, text=True, timeout=20
    )
    assert refused.returncode == 2
    assert "Cannot write to /proc/nowhere" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_state_folder_too_deep_for_sockets_is_no_obstacle(demo_model: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with running_gateway(config(tmp_path, demo_model), deep) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY | {"stream": False}, timeout=20)
        assert answer.status_code == 200
        assert gateway.stop() == 0
    assert list((deep / "state" / "engines").iterdir()) == []


@pytest.mark.slow
def test_a_talkative_engine_does_not_make_the_gateway_grow(demo_model: Path, tmp_path: Path) -> None:
    """10 MiB in one line, then a MiB of log per second for a minute."""
    program = tmp_path / "talkative"
    talk = (
        "import sys, time\nsys.stderr.write('x' * (10 << 20) + '\\n')\n"
        "while True:\n    sys.stderr.write(('y' * 120 + '\\n') * 867)\n    sys.stderr.flush()\n    time.sleep(0.1)\n"
    )
    (tmp_path / "talk.py").write_text(talk)
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--alias*) {sys.executable} {tmp_path}/talk.py & ;; esac\n'
        f'exec {fake_binary(tmp_path)} "$@"\n'
    )
    program.chmod(0o755)
    with running_gateway(config(tmp_path, demo_model, engine=program), tmp_path) as gateway:
        ask(gateway.url).join()
        process = psutil.Process(gateway.pid)
        time.sleep(5)
        before, cpu = process.memory_info().rss, process.cpu_times()
        time.sleep(60)
        grown, after = process.memory_info().rss - before, process.cpu_times()
        spent = after.user + after.system - cpu.user - cpu.system
        print(f"grown by {grown / 2**20:.1f} MiB, {spent:.1f} s of CPU in a minute")
        assert grown < 4 << 20
        assert spent < 6
