"""Stopping: refuse what is new, let open answers end or say why they do not, stop all engines, tell systemd, exit 0."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.checklist import lines
from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, is_alive, running_gateway, wait_until

BODY = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000}


@contextmanager
def fleet_gateway(
    folder: Path, demo_model: Path, *, models: tuple[str, ...] = ("a",), drain_seconds: float = 5, **environment: str
) -> Iterator[GatewayProcess]:
    """A gateway over fake engines, whose switches are files in ``folder``."""
    config: dict[str, Any] = {
        "engine": {"binary": str(fake_binary(folder))},
        "memory": {"ram_reserve": 0},
        "server": {"drain_seconds": drain_seconds},
        "models": {name: {"path": str(demo_model), "context": 4096, "parallel": 4} for name in models},
    }
    with running_gateway(config, folder, environment={"FAKE_SWITCHES": str(folder), **environment}) as gateway:
        yield gateway


def switch(folder: Path, name: str, **switches: Any) -> None:
    (folder / f"{name}.json").write_bytes(orjson.dumps(switches))


def test_open_answers_end_and_new_ones_are_refused(demo_model: Path, tmp_path: Path) -> None:
    switch(tmp_path, "a", chunks=20, chunk_interval_seconds=0.1)
    with fleet_gateway(tmp_path, demo_model) as gateway, httpx.Client(base_url=gateway.url, timeout=30) as client:
        assert client.get("/readyz").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as response:
            chunks = response.iter_raw()
            received = next(chunks)
            gateway.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/readyz").status_code == 503, seconds=1, what="not ready at once")
            assert client.get("/livez").status_code == 200
            refused = client.post("/v1/chat/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_is_stopping"
            assert "retry-after" in refused.headers
            received += b"".join(chunks)
        assert received.rstrip().endswith(b"data: [DONE]")
        assert gateway.process.wait(10) == 0


@lines(113)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.slow
def test_at_the_deadline_an_answer_is_broken_off_with_a_reason(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    switch(tmp_path, "a", chunks=1000, chunk_interval_seconds=0.05)
    with fleet_gateway(tmp_path, demo_model, drain_seconds=0.5) as gateway, httpx.Client(timeout=30) as client:
        url = f"{gateway.url}/v1/chat/completions"
        client.post(url, json=BODY | {"max_tokens": 1})
        pids = gateway.engine_pids()
        threading.Timer(0.5, gateway.process.send_signal, [signal.SIGTERM]).start()
        started = time.monotonic()
        if stream:
            received = b""
            with (
                client.stream("POST", url, json=BODY | {"stream": True}) as response,
                pytest.raises(httpx.RemoteProtocolError),
            ):
                for chunk in response.iter_raw():
                    received += chunk
            *_, last = [event for event in received.split(b"\n\n") if event]
            assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "server_is_stopping"
            assert b"[DONE]" not in received
        else:
            answer = client.post(url, json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_stopping")
        assert time.monotonic() - started < 3
        assert gateway.process.wait(10) == 0
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_second_signal_does_not_wait(demo_model: Path, tmp_path: Path) -> None:
    switch(tmp_path, "a", chunks=1000, chunk_interval_seconds=0.05)
    with fleet_gateway(tmp_path, demo_model, drain_seconds=60) as gateway, httpx.Client(timeout=30) as client:
        url = f"{gateway.url}/v1/chat/completions"
        with (
            client.stream("POST", url, json=BODY | {"stream": True}) as response,
            pytest.raises(httpx.HTTPError),
        ):
            for number, _ in enumerate(response.iter_raw()):
                if number in (1, 3):
                    gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.wait(10) == 0


@pytest.mark.slow
def test_engines_that_ignore_sigterm_are_stopped_side_by_side(demo_model: Path, tmp_path: Path) -> None:
    models = ("a", "b", "c")
    for name in models:
        switch(tmp_path, name, ignore_sigterm=True)
    with fleet_gateway(tmp_path, demo_model, models=models) as gateway, httpx.Client(timeout=30) as client:
        for name in models:
            client.post(f"{gateway.url}/v1/chat/completions", json=BODY | {"model": name}).raise_for_status()
        pids = gateway.engine_pids()
        assert len(pids) == 3
        started = time.monotonic()
        assert gateway.stop() == 0
        # Each is given five seconds.
        assert time.monotonic() - started < 8
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("abstract", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_systemd_is_told(demo_model: Path, tmp_path: Path, abstract: bool) -> None:
    address = f"@lg-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        manager.settimeout(20)
        told: list[str] = []

        def until(mark: str) -> str:
            while True:
                told.append(manager.recv(4096).decode())
                if mark in told[-1]:
                    return told[-1]

        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"}
        with fleet_gateway(tmp_path, demo_model, **environment) as gateway:
            assert "STATUS=serving a" in until("READY=1")
            httpx.get(f"{gateway.url}/livez").raise_for_status()
            until("WATCHDOG=1")
            gateway.process.send_signal(signal.SIGHUP)
            assert "MONOTONIC_USEC=" in until("RELOADING=1")
            until("READY=1")
            gateway.process.send_signal(signal.SIGTERM)
            assert "EXTEND_TIMEOUT_USEC=25000000" in until("STOPPING=1")
            assert gateway.process.wait(10) == 0
