"""A request that had not begun when its engine ended is had from the next one, once; one that had begun is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway

BODY = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}


def gateway(folder: Path, demo_model: Path) -> Any:
    config = {
        "engine": {"binary": str(fake_binary(folder))},
        "memory": {"ram_reserve": 0},
        "models": {"a": {"path": str(demo_model), "context": 512}},
    }
    return running_gateway(config, folder, environment={"FAKE_SWITCHES": str(folder)})


def switch(folder: Path, **switches: Any) -> None:
    (folder / "a.json").write_bytes(orjson.dumps(switches))


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


def post(running: GatewayProcess, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/chat/completions", json=BODY | fields, timeout=30)


@pytest.mark.parametrize("stream", [True, False])
def test_the_next_engine_answers(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    switch(tmp_path, die="sigkill@request")
    with gateway(tmp_path, demo_model) as running:
        httpx.post(f"{running.url}/admin/models/a/load").raise_for_status()
        # The engine under way is the one that dies; its successor works.
        while httpx.get(f"{running.url}/admin/models/a").json()["state"] != "ready":
            pass
        switch(tmp_path)
        answer = post(running, stream=stream)
        assert answer.status_code == 200
        assert starts(tmp_path) == 2
        if stream:
            assert answer.content.rstrip().endswith(b"data: [DONE]")
            assert answer.content.count(b'"role"') == 1


@pytest.mark.slow
def test_only_once(demo_model: Path, tmp_path: Path) -> None:
    """A request that ends every engine must not end all of them."""
    switch(tmp_path, die="sigkill@request")
    with gateway(tmp_path, demo_model) as running:
        answer = post(running)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
        assert starts(tmp_path) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.slow
def test_not_after_the_answer_has_begun(demo_model: Path, tmp_path: Path, stream: bool) -> None:
    switch(tmp_path, die="sigkill@3")
    with gateway(tmp_path, demo_model) as running:
        if stream:
            received = b""
            with (
                httpx.stream("POST", f"{running.url}/v1/chat/completions", json=BODY | {"stream": True}) as response,
                pytest.raises(httpx.RemoteProtocolError),
            ):
                for chunk in response.iter_raw():
                    received += chunk
            assert b'"upstream_failed"' in received
            assert received.count(b'"content":') == 4
        else:
            assert post(running).status_code == 502
        metrics = httpx.get(f"{running.url}/metrics").text
        assert 'llama_gateway_requests_total{endpoint="chat",model="a",outcome="failed"} 1.0' in metrics
