"""The embedded engine takes llama-server's command line and behaves like it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

SCRIPT = Path(__file__).parents[1] / "app" / "engine" / "embedded.py"
COMMAND = (sys.executable, "-P", str(SCRIPT))


@pytest.fixture
def folder() -> Iterator[Path]:
    # pytest's own folders make socket paths longer than the 108 bytes that the system allows.
    with tempfile.TemporaryDirectory(prefix="lg-") as name:
        yield Path(name)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


@contextmanager
def serving(model: Path, folder: Path, *extra: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    key_file = folder / "key"
    key_file.write_text("# a comment\nsecret\n", encoding="ascii")
    path = folder / "embedded.sock"
    flags = (
        "-m", str(model), "--alias", "demo", "--host", str(path), "--api-key-file", str(key_file), "-c", "512",
        "-np", "1", "--no-kv-unified", "--fit", "off", "-t", "1", "-lv", "4", "--no-warmup", "--metrics",
        "--cors-origins", "https://gateway.invalid", *extra,
    )  # fmt: skip
    with subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "listening on" in line:
                    break
            transport = httpx.HTTPTransport(uds=str(path))
            headers = {"authorization": "Bearer secret"}
            with httpx.Client(transport=transport, base_url="http://engine", headers=headers, timeout=30) as client:
                yield process, client
        finally:
            process.kill()


def test_it_says_who_it_is() -> None:
    version = run("--version")
    assert (version.returncode, version.stdout) == (0, "")
    assert version.stderr.startswith("version: xllamacpp 20")
    assert "(build 1" in version.stderr
    listing = run("--list-devices")
    assert (listing.returncode, listing.stdout.splitlines()[0]) == (0, "Available devices:")
    text = run("--help")
    assert text.returncode == 0
    assert "\n-c, --ctx-size N                        size of the prompt context\n" in text.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nonsense",), "error: invalid argument: --nonsense"),
        (("-c",), 'error while handling argument "-c": expected value for argument'),
        (("-c", "many"), 'error while handling argument "-c": '),
        (("-ctk", "q9"), 'error while handling argument "-ctk": unknown value: q9'),
        (("--device", "CUDA7"), "the embedded engine uses all of its devices or none"),
        (("--api-key-file", "/no/such/file"), 'error while handling argument "--api-key-file"'),
        (("-c", "512"), "error: --model is required"),
    ],
)
def test_a_command_line_that_it_does_not_understand_ends_it(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.returncode == 1
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_called_app_does_not_shadow_it(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit(9)\n", encoding="ascii")
    (tmp_path / "xllamacpp.py").write_text("raise SystemExit(9)\n", encoding="ascii")
    assert run("--version", cwd=tmp_path).returncode == 0


def test_it_answers_with_the_flags_it_was_given(demo_model: Path, folder: Path) -> None:
    with serving(demo_model, folder, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "--ctx_checkpoints", "2") as (
        _,
        client,
    ):
        assert client.get("/health").json() == {"status": "ok"}
        health = client.get("/health", headers={"origin": "https://evil.example"})
        assert health.headers["access-control-allow-origin"] == "https://gateway.invalid"
        assert client.get("/v1/models", headers={"authorization": ""}).status_code == 401
        [model] = client.get("/v1/models").json()["data"]
        assert (model["id"], model["meta"]["n_ctx"]) == ("demo", 512)
        assert "llamacpp:prompt_tokens_total" in client.get("/metrics").text
        body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] <= 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_at_once_with_an_open_stream(demo_model: Path, folder: Path, number: signal.Signals) -> None:
    with serving(demo_model, folder) as (process, client):
        body = {"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
            begun = time.monotonic()
            process.send_signal(number)
            assert process.wait(5) == 0
            assert time.monotonic() - begun < 2
        assert not (folder / "embedded.sock").exists()


def test_it_dies_with_its_parent(demo_model: Path, folder: Path) -> None:
    # A parent that starts the engine directly, without the launcher that the gateway puts between.
    code = (
        "import subprocess, sys\n"
        "engine = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE, text=True)\n"
        "next(line for line in engine.stderr if 'listening on' in line)\n"
        "print(engine.pid, flush=True)\n"
        "input()\n"
    )
    flags = ("-m", str(demo_model), "--host", str(folder / "x.sock"), "-c", "256", "-t", "1", "-lv", "4", "--no-warmup")
    arguments = [sys.executable, "-c", code, *COMMAND, *flags]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        try:
            parent.kill()
            assert select.select([descriptor], [], [], 2)[0]
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def test_a_busy_socket_is_refused_in_llama_servers_words(demo_model: Path, folder: Path) -> None:
    with serving(demo_model, folder):
        result = run("-m", str(demo_model), "--host", str(folder / "embedded.sock"), "-c", "256", "-lv", "4")
    assert result.returncode == 1
    assert "couldn't bind HTTP server socket" in result.stderr
    assert "Traceback" not in result.stderr
