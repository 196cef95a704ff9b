"""Messages when engines think, call, die and are busy: fakes do what real ones do rarely; the SDK looks on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import orjson
import pytest

from app.credential import new_key
from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway, wait_until
from tests.messages_events import events, folded
from tests.odd_engines import serving_odd_engines

_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def gateway(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving_odd_engines(demo_model, tmp_path_factory.mktemp("messages")) as running:
        yield running


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_thinking(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "thinker",
        "max_tokens": 200,
        "messages": HI,
        "thinking": {"type": "enabled", "budget_tokens": 100},
    }
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds.count("thinking") == 2
    for thought, text in (message.content, client.messages.create(**asked).content):
        assert (thought.type, thought.thinking) == ("thinking", "Let me see.")
        assert thought.signature
        assert (text.type, text.text) == ("text", "42")
    # And back: the SDK sends the blocks as they came.
    history = [*HI, message.to_param(), {"role": "user", "content": "Why?"}]
    assert client.messages.create(**asked | {"messages": history}).content[1].text == "42"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_there_and_back(client: anthropic.Anthropic, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "caller", "max_tokens": 200, "messages": HI, "tools": [TOOL]}
    if stream:
        with client.messages.stream(**asked) as running:
            message = running.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    text, first, second = message.content
    assert text.text == "I look."
    assert (first.type, first.id, first.name, first.input) == ("tool_use", "aB3", "look", {"where": "北京"})
    assert (second.id, second.input) == ("cD4", {"where": "x"})
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "aB3", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "cD4", "content": "no such place", "is_error": True},
    ]
    history = [*HI, message.to_param(), {"role": "user", "content": results}]
    assert client.messages.create(**asked | {"messages": history}).usage.output_tokens == 5
    assert client.messages.count_tokens(model="caller", messages=history, tools=[TOOL]).input_tokens > 0


def test_a_call_that_is_cut_off_is_not_made(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "caller", "max_tokens": 3, "messages": HI, "tools": [TOOL]}
    message = client.messages.create(**asked)
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["text"]
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


_BREAKS = {"dying": (502, "api_error"), "failing": (503, "overloaded_error"), "unending": (502, "api_error")}


@pytest.mark.parametrize(("model", "says"), _BREAKS.items())
def test_report_7_an_answer_that_breaks_off_never_looks_finished(
    gateway: GatewayProcess, model: str, says: tuple[int, str]
) -> None:
    received = b""
    body = {"model": model, "max_tokens": 100, "messages": HI, "stream": True}
    with (
        httpx.stream("POST", f"{gateway.url}/v1/messages", json=body, timeout=60) as answer,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for chunk in answer.iter_raw():
            received += chunk
    *before, last = events(received)
    assert before[0]["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", says[1])
    assert {"message_delta", "message_stop", "content_block_stop"}.isdisjoint(event["type"] for event in before)


@pytest.mark.parametrize(("model", "says"), _BREAKS.items())
@pytest.mark.slow
def test_report_7_the_sdk_raises(client: anthropic.Anthropic, model: str, says: tuple[int, str]) -> None:
    with (
        pytest.raises(anthropic.APIStatusError) as failure,
        client.messages.stream(model=model, max_tokens=100, messages=HI) as stream,
    ):
        stream.get_final_message()
    assert failure.value.type == says[1]
    with pytest.raises(anthropic.InternalServerError) as whole:
        client.messages.create(model=model, max_tokens=100, messages=HI)
    assert (whole.value.status_code, whole.value.type) == says


# An answer that had begun is not repeated unseen; what only passes by is worth another try.
@pytest.mark.parametrize(("model", "times"), [("unending", 1), ("failing", 3)])
def test_how_often_the_sdk_asks(gateway: GatewayProcess, model: str, times: int) -> None:
    before = _failed(gateway, model)
    with (
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=2, timeout=60) as client,
        pytest.raises(anthropic.InternalServerError),
    ):
        client.messages.create(model=model, max_tokens=100, messages=HI)
    assert _failed(gateway, model) == before + times


def _failed(gateway: GatewayProcess, model: str) -> float:
    label = f'requests_total{{endpoint="messages",model="{model}",outcome="failed"}} '
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


def test_a_model_without_eyes_says_so(client: anthropic.Anthropic) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": _PIXEL}
    picture: list[Any] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    for ask in (
        lambda: client.messages.create(model="thinker", max_tokens=1, messages=picture),
        lambda: client.messages.count_tokens(model="thinker", messages=picture),
    ):
        with pytest.raises(anthropic.BadRequestError) as failure:
            ask()
        assert "takes no pictures" in failure.value.message


def test_a_count_needs_no_slot(gateway: GatewayProcess, client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="slow", max_tokens=900, messages=HI) as stream:
        next(iter(stream.text_stream))
        assert client.messages.count_tokens(model="slow", messages=HI).input_tokens > 0
        metrics = httpx.get(f"{gateway.url}/metrics").text
    assert 'requests_total{endpoint="messages_count_tokens",model="slow",outcome="ok"} 1.0' in metrics
    # The stream was closed in its middle: its slot is free at once, not in the 40 s that it would have gone on.
    client.with_options(timeout=10).messages.create(model="slow", max_tokens=1, messages=HI)


def test_limits_and_a_full_queue(demo_model: Path, tmp_path: Path) -> None:
    (key, hashed), (other, other_hash) = new_key(), new_key()
    (tmp_path / "a.json").write_bytes(orjson.dumps({"chunks": 900, "chunk_interval_seconds": 0.02}))
    config = {
        "engine": {"binary": str(fake_binary(tmp_path))},
        "memory": {"ram_reserve": 0},
        "models": {"a": {"path": str(demo_model), "context": 1024, "parallel": 1, "max_queue": 1}},
        "keys": [{"name": "one", "hash": hashed, "requests_per_minute": 2}, {"name": "two", "hash": other_hash}],
    }
    with (
        running_gateway(config, tmp_path, environment={"FAKE_SWITCHES": str(tmp_path)}) as gateway,
        anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=60) as limited,
        anthropic.Anthropic(base_url=gateway.url, api_key=other, max_retries=0, timeout=60) as free,
    ):
        for _ in range(2):
            limited.messages.create(model="a", max_tokens=1, messages=HI)
        _assert_limited(limited)
        with free.messages.stream(model="a", max_tokens=900, messages=HI) as running:
            next(iter(running.text_stream))
            queued = threading.Thread(target=_ask, args=(free,))
            queued.start()
            wait_until(lambda: _is_queued(gateway), seconds=10, what="one waits")
            _assert_limited(free)
            running.close()
            queued.join()


def _ask(client: anthropic.Anthropic) -> None:
    client.messages.create(model="a", max_tokens=1, messages=HI)


def _is_queued(gateway: GatewayProcess) -> bool:
    return 'llama_gateway_queue_depth{model="a"} 1.0' in httpx.get(f"{gateway.url}/metrics").text


def _assert_limited(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.RateLimitError) as over:
        _ask(client)
    assert over.value.type == "rate_limit_error"
    assert int(over.value.response.headers["retry-after"]) > 0


@pytest.mark.slow
def test_a_gateway_that_stops_says_so(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(orjson.dumps({"chunks": 1000, "chunk_interval_seconds": 0.05}))
    config = {
        "engine": {"binary": str(fake_binary(tmp_path))},
        "memory": {"ram_reserve": 0},
        "server": {"drain_seconds": 1},
        "models": {"a": {"path": str(demo_model), "context": 2048}},
    }
    with (
        running_gateway(config, tmp_path, environment={"FAKE_SWITCHES": str(tmp_path)}) as gateway,
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client,
        pytest.raises(anthropic.APIStatusError) as cut,
        client.messages.stream(model="a", max_tokens=1000, messages=HI) as stream,
    ):
        for index, _ in enumerate(stream.text_stream):
            if index == 0:
                gateway.process.terminate()
                wait_until(lambda: _is_stopping(gateway), seconds=5, what="stopping")
                for refused in (_ask, _count):
                    with pytest.raises(anthropic.InternalServerError) as failure:
                        refused(client)
                    assert (failure.value.status_code, failure.value.type) == (503, "overloaded_error")
    assert cut.value.type == "overloaded_error"
    assert "stopping" in cut.value.message


def _count(client: anthropic.Anthropic) -> None:
    client.messages.count_tokens(model="a", messages=HI)


def _is_stopping(gateway: GatewayProcess) -> bool:
    return httpx.get(f"{gateway.url}/readyz").status_code == 503


def test_folded_knows_a_message_from_an_answer_that_broke_off(gateway: GatewayProcess) -> None:
    body = {"model": "thinker", "max_tokens": 200, "messages": HI, "stream": True}
    whole = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60).content
    assert folded(whole)["stop_reason"] == "end_turn"
