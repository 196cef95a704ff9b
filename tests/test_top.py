"""``llama-gateway top``: what it shows of a running gateway, and one sentence when there is none to look at."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from app.cli.status import bar, plain, screen, span, sparkline
from tests.gateway import GatewayProcess, running_gateway
from tests.test_admin import ADMIN, USER, becomes, config, hashed
from tests.test_cli import refusal, run

MIB = 1 << 20


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("top")
    (folder / "org").mkdir()
    keys = [
        {"name": "root", "hash": hashed(ADMIN), "admin": True},
        {"name": "eve", "hash": hashed(USER)},
    ]
    environment = {"FAKE_SWITCHES": str(folder)}
    with running_gateway(config(folder, demo_model, keys=keys), folder, environment=environment) as running:
        with httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {ADMIN}"}) as client:
            client.post("/admin/models/a/load")
            becomes(client, "a", "ready")
        yield running


def place(**fields: Any) -> dict[str, Any]:
    document = {
        "name": "CUDA0",
        "total_bytes": 100 * MIB,
        "others_bytes": 20 * MIB,
        "reserve_bytes": 10 * MIB,
        "planned": [
            {"model": "a", "part": "weights", "size_bytes": 40 * MIB},
            {"model": "a", "part": "kv_cache", "size_bytes": 10 * MIB},
        ],
        "measured": [],
        "planned_bytes": 50 * MIB,
        "measured_bytes": 0,
        "left_bytes": 20 * MIB,
    }
    return document | fields


def test_a_bar_is_drawn_to_scale() -> None:
    assert bar(place(), "planned", width=10).plain == "##WWWWK..r"
    assert bar(place(), "measured", width=10).plain == "##.......r"
    crowded = place(total_bytes=60 * MIB, left_bytes=-20 * MIB)
    assert len(bar(crowded, "planned", width=40).plain) == 40


def test_small_things_are_written_as_people_do() -> None:
    assert sparkline([0, 4, 8]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert [span(seconds) for seconds in (5, 125, 7300, 100_000)] == ["5 s", "2 min", "2 h 1 min", "1 d 3 h"]
    assert plain("a\x1b[2Jb\r\nc") == "a [2Jb  c"


def test_nothing_that_the_gateway_says_commands_the_terminal() -> None:
    model = {
        "id": "a\x1b[31m",
        "state": "failed",
        "slots": 1,
        "busy": 0,
        "waiting": 0,
        "waiting_for_model": 0,
        "answer_rate": None,
        "last_answer_rate": None,
        "context_tokens": 512,
        "why": "It said \x1b]0;gotcha\x07",
        "detail": "[bold]no markup[/bold]",
    }
    event = {"kind": "failed", "model": "a", "message": "x\x1b[2J", "at": 0.0}
    status = {
        "version": "1",
        "at": 10.0,
        "started_at": 0,
        "is_draining": False,
        "models": [model],
        "places": [place()],
        "events": [event],
    }
    written = io.StringIO()
    Console(file=written, width=140, color_system=None).print(screen(status, [1.0], url="u", width=140, events=5))
    assert "\x1b" not in written.getvalue()
    assert "\x07" not in written.getvalue()
    assert "[bold]no markup[/bold]" in written.getvalue()


def test_it_shows_what_the_gateway_says(gateway: GatewayProcess) -> None:
    shown = run("top", "--url", gateway.url, "--key-env", "LOOK", LOOK=ADMIN, COLUMNS="160")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "tokens/s" in shown.stdout
    rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line.split()}
    assert "ready" in rows["a"]
    assert "Serving." in rows["a"]
    assert "stopped" in rows["org/b"]
    assert "planned" in rows
    assert "Ready after" in shown.stdout


def test_json_is_the_admin_api_itself(gateway: GatewayProcess) -> None:
    shown = run("top", "--url", f"{gateway.url}/v1/", "--key-env", "LOOK", "--json", "--once", LOOK=ADMIN)
    (line,) = shown.stdout.splitlines()
    document = json.loads(line)
    assert [model["id"] for model in document["models"]] == ["a", "org/b"]
    planned = {one["part"] for one in document["places"][-1]["planned"]}
    assert {"weights", "kv_cache", "compute"} <= planned


def test_it_says_what_is_wrong(gateway: GatewayProcess) -> None:
    assert "asks for a key" in refusal("top", "--url", gateway.url)
    assert "--key-env" in refusal("top", "--url", gateway.url)
    assert "is none of the gateway" in refusal("top", "--url", gateway.url, "--key-env", "LOOK", LOOK="lg-wrong")
    assert "admin: true" in refusal("top", "--url", gateway.url, "--key-env", "LOOK", LOOK=USER)
    assert "environment variable NOT_THERE" in refusal("top", "--key-env", "NOT_THERE")


def test_it_says_that_nobody_is_there(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as unused:
        port = unused.getsockname()[1]
    assert "llama-gateway serve" in refusal("top", "--url", f"http://127.0.0.1:{port}")
    assert "no address of a gateway" in refusal("top", "--url", "box:8080")


@pytest.mark.slow
def test_on_a_terminal_it_goes_on_until_interrupted(gateway: GatewayProcess) -> None:
    here, there = pty.openpty()
    top = subprocess.Popen(
        [sys.executable, "-m", "app", "top", "--url", gateway.url, "--key-env", "LOOK"],
        stdin=there,
        stdout=there,
        stderr=subprocess.PIPE,
        env=os.environ | {"LOOK": ADMIN, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
    )
    os.close(there)
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(here, 65536):
                seen.extend(data)
        except OSError:
            # The terminal's other end is closed.
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        started = time.monotonic()
        # Twice drawn is live.
        while seen.count(b"tokens/s") < 2:
            assert time.monotonic() - started < 60, seen
            time.sleep(0.05)
        top.send_signal(signal.SIGINT)
        assert top.wait(10) == 0
    finally:
        top.kill()
        top.wait()
        reader.join(5)
        os.close(here)
        assert top.stderr is not None
        top.stderr.close()
