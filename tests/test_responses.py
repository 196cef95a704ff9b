"""OpenAI's Responses API with OpenAI's own SDK: create, stream, structured output, counts, refusals."""

from __future__ import annotations

from typing import Any, Literal

import httpx
import openai
import orjson
import pydantic
import pytest
from openai.types.responses import Response

from tests.checklist import lines, rows
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.gateway import GatewayProcess

pytestmark = pytest.mark.any_engine

QUESTION = "Why is the sky blue?"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CONVERSATION: list[Any] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 2, "b": 2}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "4"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 4."}]},
    {"role": "developer", "content": "Answer in one word."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Why is the sky"}, {"type": "input_text", "text": "blue?"}],
    },
]


@pytest.fixture
def client(gateway: GatewayProcess):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(gateway: GatewayProcess):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_create(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model="gpt-4o-mini", input=QUESTION, metadata={"a": "b"}, temperature=0, extra_body={"stop": "."}
    )
    Response.model_validate(orjson.loads(raw.text))
    answer = raw.parse()
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.metadata) == ("response", MODEL_ID, {"a": "b"})
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.temperature, answer.tool_choice, answer.tools, answer.truncation) == (0, "auto", [], "disabled")
    assert len(answer.output_text) > 20
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert raw.headers["x-context-limit"] == str(CONTEXT_TOKENS)
    assert answer._request_id


@lines(96)
def test_cut_by_max_output_tokens_is_incomplete(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    answer = client.responses.create(**asked)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 16
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == answer.output_text


def test_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "input": QUESTION, "temperature": 0, "extra_body": {"stop": "."}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.response.id}


def test_the_stream_helper(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "input": QUESTION, "temperature": 0, "extra_body": {"stop": "."}}
    with client.responses.stream(**asked) as stream:
        *_, snapshot = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshot == final.output_text
    assert final.status == "completed"


async def test_the_stream_helper_async(async_client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "input": QUESTION, "temperature": 0, "extra_body": {"stop": "."}}
    async with async_client.responses.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    whole = await async_client.responses.create(**asked)
    assert final.output_text == whole.output_text


class Weather(pydantic.BaseModel):
    sky: Literal["blue", "grey"]


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL_ID, input="The weather?", text_format=Weather)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.sky in ("blue", "grey")
    assert parsed.text.format.type == "json_schema"
    with client.responses.stream(model=MODEL_ID, input="The weather?", text_format=Weather) as stream:
        done = [event.parsed for event in stream if event.type == "response.output_text.done"]
        assert done == [stream.get_final_response().output_parsed]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": QUESTION},
        {"input": QUESTION, "instructions": "You are a poet."},
        {"input": CONVERSATION},
        {"input": QUESTION, "tools": [TOOL]},
        {"input": QUESTION, "text": {"format": {"type": "json_object"}}},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_counted_tokens_are_those_of_the_usage(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    counted = client.responses.input_tokens.count(model=MODEL_ID, **fields)
    assert counted.object == "response.input_tokens"
    answer = client.responses.create(model=MODEL_ID, max_output_tokens=1, **fields)
    assert counted.input_tokens == answer.usage.input_tokens > 10


def test_counting_takes_no_slot(client: openai.OpenAI) -> None:
    busy = [
        client.responses.create(model=MODEL_ID, input=QUESTION, stream=True, extra_body={"ignore_eos": True})
        for _ in range(2)
    ]
    for stream in busy:
        assert next(stream).type == "response.created"
    assert client.responses.input_tokens.count(model=MODEL_ID, input=QUESTION).input_tokens > 10
    for stream in busy:
        assert next(stream).type == "response.in_progress"
        stream.close()


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL_ID, input=QUESTION, max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2
    )
    (part,) = answer.output[0].content
    assert "".join(entry.token for entry in part.logprobs).startswith(part.text)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


# Refusals


@rows(1)
def test_row_1_a_long_input_loses_nothing_in_silence(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 2000 + "What is the code?"}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.responses.create(model=MODEL_ID, instructions="The code is ZEBRA-7.", input=long, stream=stream)
        assert refusal.value.code == "context_length_exceeded"
        assert refusal.value.param == "input"
        assert refusal.value.body["n_ctx"] == CONTEXT_TOKENS
        assert refusal.value.body["n_prompt_tokens"] > CONTEXT_TOKENS


def test_truncation_auto_drops_the_oldest_turns_and_says_so(client: openai.OpenAI) -> None:
    old = [{"role": "user", "content": "word " * 1200}, {"role": "assistant", "content": "Indeed."}]
    items: list[Any] = [*old, {"role": "user", "content": "Hello!"}]
    asked: dict[str, Any] = {"model": MODEL_ID, "instructions": "Be brief.", "max_output_tokens": 4}
    raw = client.responses.with_raw_response.create(input=items, truncation="auto", **asked)
    assert raw.headers["x-context-trimmed"] == "messages 1-2"
    assert raw.parse().truncation == "auto"
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(input=items, truncation="disabled", **asked)
    assert refusal.value.code == "context_length_exceeded"


def test_what_is_not_kept_cannot_be_had(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.responses.retrieve("resp_1"),
        lambda: client.responses.delete("resp_1"),
        lambda: client.responses.cancel("resp_1"),
        lambda: client.responses.input_items.list("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError) as refusal:
            ask()
        assert refusal.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL_ID, input=QUESTION, previous_response_id="resp_1")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "previous_response_id")


def test_other_refusals_have_the_names_that_the_client_used(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="nobody", input=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(model=MODEL_ID, input=QUESTION, max_output_tokens=0)
    assert refusal.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as tool:
        client.responses.create(model=MODEL_ID, input=QUESTION, tools=[{"type": "web_search"}])
    assert tool.value.param == "tools[0].type"


def test_the_same_without_v1(gateway: GatewayProcess) -> None:
    body = {"model": MODEL_ID, "input": QUESTION, "max_output_tokens": 1}
    assert httpx.post(f"{gateway.url}/responses", json=body, timeout=60).json()["usage"]["output_tokens"] == 1
    assert httpx.post(f"{gateway.url}/responses/input_tokens", json=body, timeout=60).json()["input_tokens"] > 10
    assert httpx.get(f"{gateway.url}/responses/resp_1", timeout=60).status_code == 404
    assert 'endpoint="responses",model="smollm2",outcome="ok"' in httpx.get(f"{gateway.url}/metrics").text
