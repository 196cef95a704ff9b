"""kill -9 of the engine or of the gateway, in the middle of an answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import openai
import orjson
import psutil
import pytest

from tests.checklist import lines
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, is_alive, running_gateway, wait_until

LONG_ANSWER = {
    "model": MODEL_ID,
    "messages": [{"role": "user", "content": "Count to a million."}],
    "max_tokens": 700,
    "ignore_eos": True,
}


@pytest.fixture
def own_gateway(engine: str, demo_model: Path, tmp_path: Path):
    config = {
        "engine": {"binary": engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {MODEL_ID: {"path": str(demo_model), "context": 1024, "parallel": 2}},
    }
    with running_gateway(config, tmp_path) as gateway:
        yield gateway


def engine_process(gateway: GatewayProcess) -> psutil.Process:
    """The process that holds the model: the biggest below the gateway."""
    children = psutil.Process(gateway.pid).children(recursive=True)
    return max(children, key=lambda child: child.memory_info().rss)


@lines(101)
def test_engine_killed_in_mid_stream(own_gateway: GatewayProcess) -> None:
    url = f"{own_gateway.url}/v1/chat/completions"
    received = b""
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url, json=LONG_ANSWER | {"stream": True}) as response,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for chunk in response.iter_raw():
            if not received:
                engine_process(own_gateway).kill()
            received += chunk
    *_, last = [event for event in received.split(b"\n\n") if event]
    error = orjson.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in received
    assert b'"finish_reason":"' not in received
    answer = httpx.post(url, json=LONG_ANSWER | {"max_tokens": 3}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3
    metrics = httpx.get(f"{own_gateway.url}/metrics").text
    assert f'llama_gateway_requests_total{{endpoint="chat",model="{MODEL_ID}",outcome="failed"}} 1.0' in metrics
    assert "llama_gateway_engine_restarts_total{" in metrics


@pytest.mark.slow
def test_the_sdk_raises_when_the_engine_is_killed(own_gateway: GatewayProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{own_gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        client.chat.completions.create(
            model=MODEL_ID, messages=LONG_ANSWER["messages"], max_tokens=700, stream=True
        ) as stream,
        pytest.raises(openai.APIError) as failure,
    ):
        for index, _ in enumerate(stream):
            if index == 2:
                engine_process(own_gateway).kill()
    assert failure.value.code == "upstream_failed"


@pytest.mark.slow
def test_an_answer_that_had_not_begun_is_had_from_the_next_engine(own_gateway: GatewayProcess) -> None:
    url = f"{own_gateway.url}/v1/chat/completions"
    httpx.post(url, json=LONG_ANSWER | {"max_tokens": 1}, timeout=60)
    with httpx.Client(timeout=60) as client:
        victim = engine_process(own_gateway)
        request = client.build_request("POST", url, json=LONG_ANSWER | {"max_tokens": 5})
        os.kill(victim.pid, signal.SIGSTOP)
        # The engine cannot answer any more; it is killed while the request is on its way.
        signal_when_sent(client, victim.pid)
        answer = client.send(request)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert engine_process(own_gateway).pid != victim.pid
    assert "llama_gateway_engine_restarts_total{" in httpx.get(f"{own_gateway.url}/metrics").text


def signal_when_sent(client: httpx.Client, pid: int) -> None:
    def kill(request: httpx.Request) -> None:
        os.kill(pid, signal.SIGKILL)

    client.event_hooks = {"request": [kill]}


def test_gateway_killed_in_mid_stream_leaves_no_engine(own_gateway: GatewayProcess) -> None:
    url = f"{own_gateway.url}/v1/chat/completions"
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url, json=LONG_ANSWER | {"stream": True}) as response,
        pytest.raises(httpx.HTTPError),
    ):
        pids: list[int] = []
        for _ in response.iter_raw():
            if not pids:
                pids = own_gateway.engine_pids()
                assert pids
                own_gateway.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds=1, what="the engines end with the gateway")


@lines(113)
@pytest.mark.slow
def test_gateway_stopped_in_mid_stream_leaves_nothing(own_gateway: GatewayProcess) -> None:
    url = f"{own_gateway.url}/v1/chat/completions"
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url, json=LONG_ANSWER | {"stream": True}) as response,
    ):
        chunks = response.iter_raw()
        next(chunks)
        pids = own_gateway.engine_pids()
        assert own_gateway.stop() == 0
    assert not any(is_alive(pid) for pid in pids)
    assert list((own_gateway.state_dir / "run").iterdir()) == []


@pytest.mark.slow
def test_leftovers_of_a_killed_gateway_are_removed(engine: str, demo_model: Path, tmp_path: Path) -> None:
    config = {
        "engine": {"binary": engine},
        "models": {MODEL_ID: {"path": str(demo_model), "context": 256}},
    }
    with running_gateway(config, tmp_path) as first:
        assert first.url
        first.kill()
    assert list((tmp_path / "state" / "run").iterdir()) != []
    with running_gateway(config, tmp_path) as second:
        assert second.url
        assert [folder.name for folder in (tmp_path / "state" / "run").iterdir()] == [str(second.pid)]
