"""The anthropic SDK works by changing only its base URL: messages, streams, counts, models, and its error classes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from app.credential import new_key
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.gateway import GatewayProcess, running_gateway
from tests.messages_events import folded

pytestmark = pytest.mark.any_engine

QUESTION: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY = {"temperature": 0}


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(gateway: GatewayProcess) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def _input_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=MODEL_ID, max_tokens=16, system="Be brief.", messages=QUESTION, extra_body=GREEDY
    )
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL_ID)
    assert message.id.startswith("msg_")
    (block,) = message.content
    assert block.type == "text"
    assert len(block.text) > 20
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 16
    assert message._request_id


def test_a_stream_makes_the_same_message(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "max_tokens": 24, "messages": QUESTION, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert message.content[0].text == whole.content[0].text
    assert (message.stop_reason, message.model) == ("max_tokens", MODEL_ID)
    assert message.usage.output_tokens == 24
    assert _input_tokens(message.usage) == _input_tokens(whole.usage)


async def test_the_async_client(async_client: anthropic.AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "max_tokens": 8, "messages": QUESTION, "extra_body": GREEDY}
    whole = await async_client.messages.create(**asked)
    async with async_client.messages.stream(**asked) as stream:
        text = "".join([part async for part in stream.text_stream])
    assert text == whole.content[0].text
    raw = await async_client.messages.create(**asked, stream=True)
    assert [event.type async for event in raw][-1] == "message_stop"


_PROMPTS: dict[str, dict[str, Any]] = {
    "a question": {"messages": QUESTION},
    "a conversation": {
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Answer in Greek."}],
        "messages": [*QUESTION, {"role": "assistant", "content": "Scattering. 北京🌍"}, *QUESTION],
    },
    "special tokens in a text": {"messages": [{"role": "user", "content": "<|im_start|>system\n<|im_end|>" * 3}]},
    "a round of tools": {
        "tools": [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}],
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "It is blue."}]},
        ],
    },
}


@pytest.mark.parametrize("prompt", _PROMPTS.values(), ids=_PROMPTS)
def test_a_count_is_what_the_prompt_takes(client: anthropic.Anthropic, prompt: dict[str, Any]) -> None:
    counted = client.messages.count_tokens(model=MODEL_ID, **prompt).input_tokens
    message = client.messages.create(model=MODEL_ID, max_tokens=1, **prompt)
    assert counted == _input_tokens(message.usage)
    with client.messages.stream(model=MODEL_ID, max_tokens=1, **prompt) as stream:
        start = next(iter(stream))
        stream.until_done()
    assert start.type == "message_start"
    assert start.message.usage.input_tokens == counted


def test_a_prompt_that_is_known_is_read_from_the_cache(client: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Cached or not? " * 20}]
    for known in (False, True):
        usage = client.messages.create(model=MODEL_ID, max_tokens=1, messages=asked).usage
        assert (usage.cache_read_input_tokens > 60) == known


def test_an_answer_that_the_client_has_begun_is_continued(client: anthropic.Anthropic) -> None:
    begun: list[Any] = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "one, two,"}]
    message = client.messages.create(model=MODEL_ID, max_tokens=4, messages=begun, extra_body=GREEDY)
    assert "three" in message.content[0].text


def test_a_template_that_cannot_think_passes_over_the_wish(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=MODEL_ID, max_tokens=4, messages=QUESTION, thinking={"type": "enabled", "budget_tokens": 2}
    )
    assert [block.type for block in message.content] == ["text"]


def test_the_beta_client(client: anthropic.Anthropic) -> None:
    message = client.beta.messages.create(
        model=MODEL_ID, max_tokens=2, messages=QUESTION, betas=["context-1m-2025-08-07"]
    )
    assert message.usage.output_tokens == 2


class _Verdict(BaseModel):
    is_blue: bool


def test_a_structured_answer(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model=MODEL_ID, max_tokens=60, messages=QUESTION, output_format=_Verdict, extra_body=GREEDY
    )
    assert parsed.parsed_output is not None
    assert parsed.parsed_output.is_blue in (True, False)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_matched_is_told(gateway: GatewayProcess, stream: bool) -> None:
    body = {
        "model": MODEL_ID,
        "max_tokens": 32,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Say: one two three four"}],
        "stop_sequences": ["zzz", "two"],
        "stream": stream,
    }
    answer = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60)
    message = folded(answer.content) if stream else answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")
    assert "two" not in message["content"][0]["text"]
    # The engine says it along with the whole prompt, which is nobody's.
    assert b"generation_settings" not in answer.content
    assert b"Say: one" not in answer.content


def test_an_answer_that_ends_by_itself(client: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Reply with one word: yes."}]
    message = client.messages.create(
        model=MODEL_ID, max_tokens=200, messages=asked, stop_sequences=["zzz"], extra_body=GREEDY
    )
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_the_snippet_of_the_page(gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[1] / "deploy" / "clients" / "anthropic.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    mine = snippet.replace("http://127.0.0.1:8080", gateway.url).replace('"model"', f'"{MODEL_ID}"')
    exec(compile(mine.replace("max_tokens=100", "max_tokens=8"), page.name, "exec"), {})
    count, *texts = capsys.readouterr().out.splitlines()
    assert int(count) > 0
    assert "".join(texts)


def test_models(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert [model.id for model in page.data] == [MODEL_ID]
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL_ID, MODEL_ID)
    model = client.models.retrieve("gpt-4o-mini")
    assert (model.id, model.type, model.display_name) == (MODEL_ID, "model", MODEL_ID)
    assert model.max_input_tokens == CONTEXT_TOKENS
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("no/such")


def test_an_unknown_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as failure:
        client.messages.create(model="no/such:99b", max_tokens=1, messages=QUESTION)
    assert failure.value.type == "not_found_error"
    assert failure.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="no/such:99b", messages=QUESTION)


@pytest.mark.parametrize("stream", [False, True])
def test_report_1_an_overflow_is_refused_and_nothing_is_forgotten(client: anthropic.Anthropic, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "filler " * 2000 + "What is the code?"}]
    with pytest.raises(anthropic.BadRequestError) as failure:
        client.messages.create(
            model=MODEL_ID, max_tokens=16, system="The code is ZEBRA-7.", messages=messages, stream=stream
        )
    assert failure.value.type == "invalid_request_error"
    assert "prompt is too long" in failure.value.message
    assert str(CONTEXT_TOKENS) in failure.value.message


def test_an_answer_too_long_for_its_prompt_says_by_how_much(client: anthropic.Anthropic) -> None:
    prompt = client.messages.count_tokens(model=MODEL_ID, messages=QUESTION).input_tokens
    with pytest.raises(anthropic.BadRequestError) as failure:
        client.messages.create(model=MODEL_ID, max_tokens=CONTEXT_TOKENS, messages=QUESTION, stream=True)
    says = f"input length and `max_tokens` exceed context limit: {prompt} + {CONTEXT_TOKENS} > {CONTEXT_TOKENS}"
    assert says in failure.value.message


_REFUSALS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "no body": ("/v1/messages", {"content": b""}, 400, "invalid_request_error"),
    "no object": ("/v1/messages/count_tokens", {"content": b"[]"}, 400, "invalid_request_error"),
    "no limit": ("/v1/messages", {"json": {"model": MODEL_ID, "messages": QUESTION}}, 400, "invalid_request_error"),
    "a form": ("/v1/messages", {"data": {"a": "b"}}, 415, "invalid_request_error"),
    "no such path": ("/v1/messages/batches", {"json": {}}, 404, "not_found_error"),
    "an unknown model": (
        "/messages",
        {"json": {"model": "x", "max_tokens": 1, "messages": QUESTION}},
        404,
        "not_found_error",
    ),
    "too large": ("/v1/messages", {"content": b" " * (16 * 2**20 + 1)}, 413, "request_too_large"),
    "an unknown host": ("/v1/messages", {"headers": {"host": "evil.example"}}, 403, "permission_error"),
}


@pytest.mark.parametrize(("path", "request_", "status", "kind"), _REFUSALS.values(), ids=_REFUSALS)
def test_every_refusal_is_in_anthropics_shape(
    gateway: GatewayProcess, path: str, request_: dict[str, Any], status: int, kind: str
) -> None:
    answer = httpx.post(gateway.url + path, timeout=60, **request_)
    assert answer.status_code == status
    document = answer.json()
    assert (set(document), document["type"]) == ({"type", "error"}, "error")
    assert document["error"]["type"] == kind
    assert document["error"]["message"]


def test_another_method(gateway: GatewayProcess) -> None:
    answer = httpx.get(f"{gateway.url}/v1/messages")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_other_apis_keep_their_own_errors(gateway: GatewayProcess) -> None:
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json={})
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_keys(one_engine: str, demo_model: Path, tmp_path: Path) -> None:
    (alice, alice_hash), (bob, bob_hash) = new_key(), new_key()
    config = {
        "engine": {"binary": one_engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {"a": {"path": str(demo_model), "context": 256}, "b": {"path": str(demo_model), "context": 256}},
        "keys": [{"name": "alice", "hash": alice_hash}, {"name": "bob", "hash": bob_hash, "models": ["b"]}],
    }
    asked: dict[str, Any] = {"max_tokens": 1, "messages": QUESTION}
    with running_gateway(config, tmp_path) as gateway:

        def client(**key: str) -> anthropic.Anthropic:
            return anthropic.Anthropic(base_url=gateway.url, max_retries=0, timeout=60, **key)

        with client(api_key=alice + "x") as nobody, client(api_key=bob) as of_bob, client(auth_token=bob) as bearer:
            with pytest.raises(anthropic.AuthenticationError) as wrong:
                nobody.messages.create(model="a", **asked)
            assert wrong.value.type == "authentication_error"
            with pytest.raises(anthropic.PermissionDeniedError) as forbidden:
                of_bob.messages.create(model="a", **asked)
            assert forbidden.value.type == "permission_error"
            with pytest.raises(anthropic.PermissionDeniedError):
                of_bob.messages.count_tokens(model="a", messages=QUESTION)
            for same in (of_bob, bearer):
                assert same.messages.create(model="b", **asked).usage.output_tokens == 1
            assert [model.id for model in of_bob.models.list()] == ["b"]
        log = "".join(gateway.log)
    assert alice not in log
    assert bob not in log
