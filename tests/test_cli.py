"""The command line: each mistake is one sentence with its cure and exit code 2, and nothing half-started stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import MODEL_ID

_MARK = "GATEWAY_TEST_RUN"


def run(*arguments: str, seconds: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``llama-gateway`` to its end, and see that no process of it is left."""
    mark = {_MARK: uuid.uuid4().hex}
    ended = subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | environment | mark,
        stdin=subprocess.DEVNULL,
    )
    assert started_by(mark[_MARK]) == []
    return ended


def started_by(mark: str) -> list[psutil.Process]:
    """Live processes with this mark in their environment, which engines inherit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found


def refusal(*arguments: str, code: int = 2, **environment: str) -> str:
    """The sentence that a refused command prints."""
    ended = run(*arguments, **environment)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    *_, last = ended.stderr.strip().splitlines()
    assert last.startswith("llama-gateway: ")
    return last.removeprefix("llama-gateway: ")


def script(folder: Path, body: str) -> Path:
    """An executable shell script."""
    path = folder / "llama-server"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def config(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_missing_model(tmp_path: Path) -> None:
    said = refusal("serve", "--model", str(tmp_path / "absent.gguf"))
    assert f"there is no file {tmp_path / 'absent.gguf'}" in said
    file = config(tmp_path, "models:\n  a:\n    path: absent.gguf\n")
    assert refusal("serve", "--config", file).startswith(f"{file}:3: models.a.path: there is no file")
    assert refusal("check-config", file).startswith(f"{file}:3: models.a.path: there is no file")


def test_misspelt_key(tmp_path: Path, demo_model: Path) -> None:
    file = config(tmp_path, f"models:\n  a: {{path: {demo_model}, contxt: 4096}}\n")
    for command in (("serve", "--config", file), ("check-config", file)):
        assert refusal(*command) == f"{file}:2: models.a.contxt: this key is unknown; did you mean 'context'?"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    page = tmp_path / "model.gguf"
    page.write_text("<!DOCTYPE html><html>404</html>")
    assert "is a web page" in refusal("serve", "--model", str(page))
    assert "is a web page" in refusal("plan", str(page))


@pytest.mark.slow
def test_port_in_use(demo_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refusal("serve", "--model", str(demo_model), "--port", port)
        assert f"Cannot listen on 127.0.0.1 port {port}" in said
        assert "choose another --port" in said
        assert f"port {port}" in refusal("demo", "--once", "--port", port)


def test_an_open_door_without_keys(demo_model: Path) -> None:
    said = refusal("serve", "--model", str(demo_model), "--host", "0.0.0.0")
    assert "keys new" in said


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("kill -ILL $$", "another CPU"),
        (
            "echo 'x: error while loading shared libraries: libllama.so.0: cannot open' >&2; exit 127",
            "libllama.so.0",
        ),
        ("exit 1", "llama-server"),
    ],
)
def test_broken_engine(tmp_path: Path, demo_model: Path, body: str, says: str) -> None:
    file = config(
        tmp_path,
        f"engine: {{binary: {script(tmp_path, body)}}}\nmodels:\n  a: {{path: {demo_model}}}\nserver: {{port: 0}}\n",
    )
    assert says in refusal("serve", "--config", file)
    assert not any((tmp_path / "state").glob("run/*"))


def test_an_engine_that_does_not_exist(tmp_path: Path, demo_model: Path) -> None:
    file = config(tmp_path, f"engine: {{binary: bin/llama-server}}\nmodels:\n  a: {{path: {demo_model}}}\n")
    assert str(tmp_path / "bin/llama-server") in refusal("serve", "--config", file)


@pytest.mark.slow
def test_a_broken_engine_on_path_gives_way_to_the_embedded_one(tmp_path: Path, demo_model: Path) -> None:
    script(tmp_path, "kill -ILL $$")
    ended = run("demo", "--once", "--prompt", "Hi.", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert ended.returncode == 0, ended.stderr
    engine, *_ = ended.stdout.splitlines()
    assert "embedded" in engine
    assert "another CPU" in engine


def test_nothing_to_serve(tmp_path: Path) -> None:
    assert "--model" in refusal("serve")
    assert "no models" in refusal("serve", "--config", config(tmp_path, "server: {port: 0}\n"))


def test_a_state_folder_that_cannot_be_written(tmp_path: Path, demo_model: Path) -> None:
    # A file where the folder should be stops root as well.
    (tmp_path / "state").write_text("")
    file = config(tmp_path, f"models:\n  a: {{path: {demo_model}}}\nserver: {{port: 0}}\n")
    assert "state_dir" in refusal("serve", "--config", file)


def test_check_config(tmp_path: Path, demo_model: Path) -> None:
    file = config(tmp_path, f"models:\n  a: {{path: {demo_model}}}\n")
    assert run("check-config", file).stdout == f"{file}: valid; 1 models, 0 keys.\n"


def test_a_new_key_opens_the_door(tmp_path: Path, demo_model: Path) -> None:
    printed = run("keys", "new", "alice").stdout
    assert printed.count("lg-") == 1
    line = printed.splitlines()[-1]
    file = config(tmp_path, f"keys:\n{line}\nmodels:\n  a: {{path: {demo_model}}}\n")
    assert run("check-config", file).returncode == 0


def test_plan_as_json(demo_model: Path) -> None:
    plan = json.loads(run("plan", str(demo_model), "--context", "2048", "--json").stdout)
    assert set(plan) == {"model", "machine", "placement", "memory", "expected", "reasons", "verified", "argv"}
    assert plan["model"]["architecture"] == "llama"
    assert plan["model"]["layers"] == 30
    assert plan["placement"]["context_per_request"] == 2048
    assert plan["memory"]["host"]["weights_bytes"] > 90 << 20
    assert {"setting", "value", "because"} == set(plan["reasons"][0])
    assert str(demo_model) in plan["argv"]


def test_plan_for_a_described_machine(demo_model: Path) -> None:
    plan = json.loads(run("plan", str(demo_model), "--vram", "8GiB", "--ram", "32GiB", "--json").stdout)
    assert plan["placement"]["gpu_layers"] == 31
    (device,) = plan["memory"]["devices"]
    assert device["left_bytes"] == (8 << 30) - device["reserve_bytes"] - device["total_bytes"]
    assert "nothing fits" not in refusal("plan", str(demo_model), "--vram", "0", "--ram", "1MiB", code=3)
    assert "--vram" in refusal("plan", str(demo_model), "--vram", "much")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_demo_serves_until_it_is_stopped(engine: str, demo_model: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app", "demo", "--port", "0", "--prompt", "Hi.", "--engine", engine],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        printed = ""
        for line in demo.stdout:
            printed += line
            if line.startswith("curl "):
                break
        url = printed.split("curl ")[1].split(" ")[0]
        command = printed.split("\n")[-2]
        answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert json.loads(answer.stdout)["model"] == MODEL_ID, (url, answer)
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        assert demo.wait(20) == 0
    assert not [child for child in children if child.is_running()]


def test_demo_once(engine: str, demo_model: Path) -> None:
    ended = run("demo", "--once", "--engine", engine)
    assert ended.returncode == 0, ended.stderr
    for label in ("engine ", "model ", "place ", "memory ", "> Why is the sky blue?", "speed ", "tokens/s", "curl "):
        assert label in ended.stdout
    assert ended.stderr == ""
    answer = ended.stdout.split("two sentences.")[1].split("speed")[0]
    assert len(answer.split()) > 20


def test_demo_with_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        said = refusal("demo", "--once", XDG_CACHE_HOME=str(small))
        assert "XDG_CACHE_HOME" in said
        assert not [path for path in small.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
def test_demo_repairs_a_damaged_cache(tmp_path: Path, demo_model: Path) -> None:
    cached = tmp_path / "llama-gateway" / demo_model.name
    cached.parent.mkdir()
    cached.write_bytes(demo_model.read_bytes()[:-1] + b"x")
    ended = run("demo", "--once", "--prompt", "Hi.", "--engine", "embedded", XDG_CACHE_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert cached.read_bytes() == demo_model.read_bytes()
    assert list(cached.parent.iterdir()) == [cached]
