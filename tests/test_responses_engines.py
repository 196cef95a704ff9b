"""Responses when engines think, call and die: fakes do what real ones do rarely; OpenAI's SDK looks on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.checklist import lines, rows
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, running_gateway
from tests.odd_engines import serving_odd_engines
from tests.test_deaths import engine_process

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"where": {"type": "string"}},
        "required": ["where"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def fakes(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving_odd_engines(demo_model, tmp_path_factory.mktemp("responses")) as running:
        yield running


@pytest.fixture
def client(fakes: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fakes.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_reasoning_there_and_back(client: openai.OpenAI) -> None:
    with client.responses.stream(model="thinker", input="hi") as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds.count("response.reasoning_text.delta") == 2
    for answer in (response, client.responses.create(model="thinker", input="hi")):
        reasoning, message = answer.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Let me see.")
        assert (message.type, answer.output_text) == ("message", "42")
        assert answer.usage.output_tokens_details.reasoning_tokens == 2
    history = [{"role": "user", "content": "hi"}, *response.output, {"role": "user", "content": "Why?"}]
    assert client.responses.create(model="thinker", input=history).output_text == "42"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_there_and_back(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "caller", "tools": [TOOL]}
    if stream:
        with client.responses.stream(input="hi", **asked) as running:
            snapshots = [event.snapshot for event in running if "arguments.delta" in event.type]
            response = running.get_final_response()
        assert snapshots[1] == '{"where":"\\u5317京"}'
    else:
        response = client.responses.parse(input="hi", **asked)
    text, first, second = response.output
    assert (response.status, text.content[0].text) == ("completed", "I look.")
    assert (first.type, first.call_id, first.name) == ("function_call", "aB3", "look")
    assert orjson.loads(first.arguments) == {"where": "北京"}
    assert (second.call_id, second.parsed_arguments) == ("cD4", {"where": "x"})
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in (first, second)]
    history: list[Any] = [{"role": "user", "content": "hi"}, *response.output, *outputs]
    assert client.responses.create(input=history, **asked).output_text == "I look."
    assert client.responses.input_tokens.count(input=history, **asked).input_tokens > 0


def test_a_call_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="caller", input="hi", tools=[TOOL], max_output_tokens=3)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["completed", "incomplete"]


def test_a_strict_format_that_is_not_kept_is_no_answer(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    asked: dict[str, Any] = {"model": "thinker", "input": "hi", "text": {"format": schema}}
    with pytest.raises(openai.InternalServerError) as whole:
        client.responses.create(**asked)
    assert whole.value.code == "answer_rejected"
    assert "'text.format'" in whole.value.message
    kinds: list[str] = []
    with pytest.raises(openai.APIError) as failure, client.responses.create(**asked, stream=True) as stream:
        for event in stream:
            kinds.append(event.type)
    assert (failure.value.code, kinds[-1]) == ("answer_rejected", "response.failed")


_BREAKS = {
    "dying": (502, "upstream_failed"),
    "failing": (503, "server_is_overloaded"),
    "unending": (502, "upstream_failed"),
}


@rows(7)
@pytest.mark.parametrize(("model", "says"), _BREAKS.items())
def test_row_7_an_answer_that_breaks_off_never_looks_finished(
    fakes: GatewayProcess, model: str, says: tuple[int, str]
) -> None:
    received = b""
    body = {"model": model, "input": "hi", "stream": True}
    with (
        httpx.stream("POST", f"{fakes.url}/v1/responses", json=body, timeout=60) as answer,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for chunk in answer.iter_raw():
            received += chunk
    events = [orjson.loads(block.split(b"data: ")[1]) for block in received.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    *before, failed, error = events
    assert before[0]["type"] == "response.created"
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", says[1], says[1])
    assert {"response.completed", "response.incomplete", "response.output_item.done"}.isdisjoint(
        event["type"] for event in before
    )


@rows(7)
@pytest.mark.parametrize(("model", "says"), _BREAKS.items())
@pytest.mark.slow
def test_row_7_the_sdk_raises(client: openai.OpenAI, model: str, says: tuple[int, str]) -> None:
    with pytest.raises(openai.APIError) as failure, client.responses.stream(model=model, input="hi") as stream:
        stream.get_final_response()
    assert failure.value.code == says[1]
    with pytest.raises(openai.InternalServerError) as whole:
        client.responses.create(model=model, input="hi")
    assert (whole.value.status_code, whole.value.code) == says


# An answer that had begun is not repeated unseen; what only passes by is worth another try.
@pytest.mark.parametrize(("model", "times"), [("unending", 1), ("failing", 3)])
def test_how_often_the_sdk_asks(fakes: GatewayProcess, model: str, times: int) -> None:
    before = _failed(fakes, model)
    with (
        openai.OpenAI(base_url=f"{fakes.url}/v1", api_key="none", max_retries=2, timeout=60) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.responses.create(model=model, input="hi")
    assert _failed(fakes, model) == before + times


def _failed(gateway: GatewayProcess, model: str) -> float:
    label = f'requests_total{{endpoint="responses",model="{model}",outcome="failed"}} '
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


@pytest.mark.slow
@lines(101)
def test_a_real_engine_is_killed_in_mid_stream(one_engine: str, demo_model: Path, tmp_path: Path) -> None:
    config = {
        "engine": {"binary": one_engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {MODEL_ID: {"path": str(demo_model), "context": 1024}},
    }
    asked: dict[str, Any] = {"model": MODEL_ID, "input": "Count.", "extra_body": {"ignore_eos": True}}
    with (
        running_gateway(config, tmp_path) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        kinds: list[str] = []
        with pytest.raises(openai.APIError) as failure, client.responses.create(**asked, stream=True) as stream:
            for event in stream:
                kinds.append(event.type)
                if len(kinds) == 6:
                    os.kill(engine_process(gateway).pid, signal.SIGKILL)
        assert failure.value.code == "upstream_failed"
        assert kinds[-1] == "response.failed"
        assert client.responses.create(**asked, max_output_tokens=2).usage.output_tokens == 2
