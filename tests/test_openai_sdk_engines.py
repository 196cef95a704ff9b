"""OpenAI's SDK when engines think, call and fail: fakes do what real ones do rarely."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from pydantic import BaseModel

from app.credential import new_key
from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway
from tests.odd_engines import serving_odd_engines

HI: list[Any] = [{"role": "user", "content": "hi"}]


class look(BaseModel):  # noqa: N801 - the name of the function
    """Looks."""

    where: str


@pytest.fixture(scope="module")
def fakes(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving_odd_engines(demo_model, tmp_path_factory.mktemp("openai")) as running:
        yield running


@pytest.fixture
def client(fakes: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fakes.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_tools_there_and_back(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "caller", "messages": HI, "tools": [openai.pydantic_function_tool(look)]}
    if stream:
        with client.chat.completions.stream(**asked) as running:
            deltas = [event.arguments_delta for event in running if event.type.endswith("arguments.delta")]
            completion = running.get_final_completion()
        assert len(deltas) > 2
    else:
        completion = client.chat.completions.parse(**asked)
    (choice,) = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    first, second = choice.message.tool_calls
    assert (first.id, first.function.name, second.id) == ("aB3", "look", "cD4")
    assert (first.function.parsed_arguments, second.function.parsed_arguments) == (look(where="北京"), look(where="x"))
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in (first, second)]
    answer = client.chat.completions.create(**asked | {"messages": [*HI, choice.message, *results]})
    assert answer.choices[0].message.content == "I look."


def test_thoughts_come_apart_from_the_answer(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model="thinker", messages=HI).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "42")


# An answer that had begun is not repeated unseen; what only passes by is worth another try.
@pytest.mark.parametrize(("model", "times"), [("unending", 1), ("failing", 3)])
def test_how_often_the_engine_is_asked(fakes: GatewayProcess, model: str, times: int) -> None:
    before = _failed(fakes, model)
    with (
        openai.OpenAI(base_url=f"{fakes.url}/v1", api_key="none", max_retries=2, timeout=60) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.chat.completions.create(model=model, messages=HI, max_tokens=100)
    assert _failed(fakes, model) == before + times


def _failed(gateway: GatewayProcess, model: str) -> float:
    label = f'requests_total{{endpoint="chat",model="{model}",outcome="failed"}} '
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


def test_what_the_client_did_wrong_and_a_spent_budget_are_not_tried_again(demo_model: Path, tmp_path: Path) -> None:
    secret, key_hash = new_key()
    (tmp_path / "a.json").write_bytes(orjson.dumps({"chunks": 3}))
    config = {
        "engine": {"binary": str(fake_binary(tmp_path))},
        "models": {"a": {"path": str(demo_model), "context": 512}},
        "keys": [{"name": "alice", "hash": key_hash, "requests_per_day": 2}],
    }
    asked: dict[str, Any] = {"model": "a", "messages": HI, "max_tokens": 3}
    sent: list[Any] = []
    with (
        running_gateway(config, tmp_path, environment={"FAKE_SWITCHES": str(tmp_path)}) as running,
        openai.DefaultHttpxClient(event_hooks={"request": [sent.append]}) as counting,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=secret, http_client=counting) as client,
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**asked | {"max_tokens": 5000})
        assert len(sent) == 1
        for _ in range(2):
            client.chat.completions.create(**asked)
        with pytest.raises(openai.RateLimitError) as failure:
            client.chat.completions.create(**asked)
        assert failure.value.code == "insufficient_quota"
        assert len(sent) == 4
