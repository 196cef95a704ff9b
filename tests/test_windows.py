"""The gateway on Windows: the Python of Windows runs it, with the embedded engine of Windows, under Wine.

Wine's Job Objects, process handles and overlapped pipes are what is used here as on Windows; it knows no Ctrl+Break.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest
import yaml

from app.cache_folder import cache_dir
from app.engine.records import INSTANCE_VARIABLE
from tests.gateway import GatewayProcess, is_alive, wait_until
from tests.windows_python import WindowsPython, windows_path, windows_python

# The first run fetches the Python and a hundred megabytes of what it needs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_CTRL_C = Path(__file__).with_name("windows_ctrl_c.py")
_LOAD_SECONDS = 30.0


@pytest.fixture(scope="module")
def windows() -> Iterator[WindowsPython]:
    if sys.platform != "linux" or shutil.which("wine") is None:
        pytest.skip("no Wine on this machine; apt-get install --no-install-recommends wine wine64")
    with windows_python() as python:
        yield python


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway lives, and the model that it serves: its name is in the command line of its engines alone."""

    windows: WindowsPython
    folder: Path
    model: Path
    name: str = field(default_factory=lambda: f"m{secrets.token_hex(4)}")

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def config(self) -> str:
        document = {
            "state_dir": windows_path(self.state_dir),
            "server": {"port": 0, "drain_seconds": 2},
            "memory": {"ram_reserve": "256MiB"},
            "models": {self.name: {"path": windows_path(self.model), "context": 1024, "max_tokens": 512}},
        }
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(document))
        return windows_path(file)

    def engines(self) -> list[int]:
        """Engines of ours that run, by their Linux numbers."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if self.name in words and "--alias" in words and is_alive(process.pid):
                found.append(process.pid)
        return found

    @contextmanager
    def serving(self, *before: str) -> Iterator[GatewayProcess]:
        """A gateway of this place; ``before`` is what starts it instead of Wine. It is ended the hard way."""
        command = ["-m", "app", "serve", "--config", self.config()]
        process = self.windows.start([*before, *([self.windows.python] if before else []), *command])
        gateway = GatewayProcess(process, state_dir=self.state_dir)
        try:
            yield gateway
        finally:
            process.kill()
            process.wait(10)
            for engine in self.engines():
                # It would keep the pipes open that are closed next.
                os.kill(engine, signal.SIGKILL)
            gateway.stop()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                stream.close()

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": self.name, "messages": [{"role": "user", "content": "Count to ten."}], **more}


@pytest.fixture(scope="module")
def place(windows: WindowsPython, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(windows, tmp_path_factory.mktemp("windows"), demo_model)


def answer(place: Place, url: str) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json=place.body(max_tokens=8), timeout=_LOAD_SECONDS)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed_words(place: Place, url: str) -> str:
    body = place.body(max_tokens=16, stream=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=_LOAD_SECONDS) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(orjson.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])


def test_it_serves_restarts_refuses_a_second_and_ends_at_ctrl_c(place: Place) -> None:
    with place.serving(windows_path(_CTRL_C)) as gateway:
        url = gateway.url
        assert answer(place, url)["usage"]["completion_tokens"] == 8
        assert streamed_words(place, url).strip()

        model = httpx.get(f"{url}/admin/models/{place.name}").json()
        assert kill_by_number(place.windows, model["pid"])
        answer(place, url)
        restarts = [event for event in httpx.get(f"{url}/admin/events").json()["data"] if event["kind"] == "restart"]
        assert [event["cause"] for event in restarts] == ["crash"]

        code, output = place.windows.run(["-m", "app", "serve", "--config", place.config()])
        assert code == 2
        assert "Another gateway (process " in output
        assert "uses the state folder" in output

        code, output = place.windows.run(["-m", "app", "top", "--once", "--url", url])
        assert code == 0, output
        assert place.name in output

        assert gateway.process.stdin is not None
        gateway.process.stdin.write("\n")
        gateway.process.stdin.flush()
        assert gateway.process.wait(20) == 0
        assert not place.engines()
    assert list((place.state_dir / "engines").iterdir()) == []


def kill_by_number(windows: WindowsPython, pid: int) -> bool:
    code, _ = windows.run(["-c", f"import psutil; psutil.Process({pid}).kill()"])
    return code == 0


@pytest.mark.parametrize("moment", ["load", "idle", "stream"])
def test_no_engine_outlives_a_gateway_that_is_killed(place: Place, moment: str) -> None:
    """The next one starts on what the last one left in the state folder."""
    with place.serving() as gateway:
        url = gateway.url
        asking = threading.Thread(target=ask_in_vain, args=(place, url), daemon=True)
        if moment == "idle":
            answer(place, url)
        else:
            asking.start()
            wait_until(place.engines, seconds=_LOAD_SECONDS, what="an engine loads")
        if moment == "stream":
            busy = f'llama_gateway_slots{{model="{place.name}",state="busy"}} 1.0'
            wait_until(lambda: busy in httpx.get(f"{url}/metrics").text, seconds=_LOAD_SECONDS, what="it streams")
        assert place.engines()
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.process.wait(10)
        wait_until(lambda: not place.engines(), seconds=1, what="the engines are gone")


def ask_in_vain(place: Place, url: str) -> None:
    try:
        httpx.post(f"{url}/v1/chat/completions", json=place.body(stream=True), timeout=_LOAD_SECONDS)
    except httpx.HTTPError:
        pass


_SLEEPER = """
import os, pathlib, sys, time
from app.engine.records import write_record
if sys.argv[1:]:
    write_record(pathlib.Path(sys.argv[1]), pid=os.getpid(), name="left behind")
print(os.getpid(), flush=True)
time.sleep(100)
"""


@contextmanager
def sleeper(windows: WindowsPython, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that sleeps, and its number on Windows."""
    with windows.start(["-c", _SLEEPER, *arguments], environment=environment) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_only_what_this_state_folder_left_behind_is_ended(place: Place) -> None:
    windows, records = place.windows, place.state_dir / "engines"
    records.mkdir(parents=True, exist_ok=True)
    mark, others_mark = (windows_path(folder) for folder in (place.state_dir, place.folder / "other"))
    with (
        sleeper(windows, windows_path(records)) as (recorded, _),
        sleeper(windows, **{INSTANCE_VARIABLE: mark}) as (marked, _),
        sleeper(windows, **{INSTANCE_VARIABLE: others_mark}) as (other, _),
        sleeper(windows) as (later, number),
    ):
        stale = {"pid": number, "started": 1.0, "boot": "", "name": "had this number before"}
        (records / "stale.json").write_bytes(orjson.dumps(stale))
        with place.serving() as gateway:
            assert gateway.url
            assert recorded.wait(5) is not None
            assert marked.wait(5) is not None
            assert other.poll() is None
            assert later.poll() is None
            assert list(records.iterdir()) == []


def test_the_other_commands(place: Place) -> None:
    windows, model = place.windows, windows_path(place.model)
    for arguments, said in (
        (["check-config", place.config()], "valid; 1 models"),
        (["doctor"], "xllamacpp"),
        (["plan", model, "--verify"], "on the CPU"),
        (["demo", "--once", "--port", "0"], "speed"),
    ):
        cache = {"XDG_CACHE_HOME": windows_path(cache_dir().parent)}
        code, output = windows.run(["-m", "app", *arguments], environment=cache)
        assert code == 0, output
        assert said in output
