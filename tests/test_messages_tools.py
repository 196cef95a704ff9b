"""Tools through Anthropic's SDK on a real engine: offered, called, answered, counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.calling_model import calling_gateway
from tests.conftest import MODEL_ID

WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}},
        "required": ["city"],
    },
}
OTHER: Any = {"name": "get_time", "description": "Time", "input_schema": {"type": "object", "properties": {}}}
QUESTION: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(
    native_engine: Path | None, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[anthropic.Anthropic]:
    folder = tmp_path_factory.mktemp("tools")
    with (
        calling_gateway(native_engine, demo_model, folder) as gateway,
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def _asked(**fields: Any) -> dict[str, Any]:
    choice = {"type": "tool", "name": "get_weather"}
    asked = {"model": MODEL_ID, "max_tokens": 60, "messages": QUESTION, "tools": [OTHER, WEATHER]}
    return asked | {"tool_choice": choice, "extra_body": GREEDY} | fields


def _input_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens)


def test_a_tool_is_called_and_its_result_taken(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**_asked())
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history: list[Any] = [*QUESTION, message.to_param(), {"role": "user", "content": [result]}]
    answer = client.messages.create(**_asked(messages=history, tool_choice={"type": "auto"}, max_tokens=2))
    assert _input_tokens(answer.usage) > _input_tokens(message.usage)


def test_a_stream_makes_the_same_call(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**_asked())
    with client.messages.stream(**_asked()) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert len(parts) > 1
    assert message.stop_reason == "tool_use"
    assert [(call.name, call.input) for call in message.content] == [(call.name, call.input) for call in whole.content]


def test_tools_are_counted_as_the_engine_does(client: anthropic.Anthropic) -> None:
    plain = client.messages.count_tokens(model=MODEL_ID, messages=QUESTION).input_tokens
    for tools in ([WEATHER], [OTHER, WEATHER]):
        counted = client.messages.count_tokens(model=MODEL_ID, messages=QUESTION, tools=tools).input_tokens
        message = client.messages.create(model=MODEL_ID, max_tokens=1, messages=QUESTION, tools=tools)
        assert counted == _input_tokens(message.usage)
        assert counted > plain + 20


def test_a_call_that_is_cut_off_is_left_out(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**_asked(max_tokens=14))
    assert message.stop_reason == "max_tokens"
    assert not [block for block in message.content if block.type == "tool_use"]
