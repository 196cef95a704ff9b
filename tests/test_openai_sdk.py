"""The openai SDK works by changing only its base URL: chat, streams, models, and its error classes."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from app.credential import new_key
from tests.checklist import lines, rows
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.gateway import GatewayProcess, running_gateway

QUESTION: list[dict[str, str]] = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture
def client(gateway: GatewayProcess):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(gateway: GatewayProcess):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_ID, messages=QUESTION, max_tokens=16, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL_ID
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content) > 20
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer._request_id


@rows(13)
@lines(97, 99)
def test_stream_equals_the_whole_answer_and_has_one_usage_chunk(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL_ID, messages=QUESTION, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL_ID,
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24


@rows(13)
@lines(99)
def test_stream_without_usage_has_no_chunk_without_choices(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL_ID, messages=QUESTION, max_tokens=8, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


@lines(68)
def test_two_choices_have_their_usage_summed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_ID, messages=QUESTION, max_tokens=8, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 16


@lines(69)
def test_two_streamed_choices_have_one_usage_chunk_at_the_end(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL_ID,
            messages=QUESTION,
            max_tokens=8,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [index for index, chunk in enumerate(chunks) if chunk.usage] == [len(chunks) - 1]
    assert chunks[-1].usage.completion_tokens == 16


class _Verdict(BaseModel):
    is_blue: bool


def test_a_structured_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_ID, "messages": QUESTION, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.parse(response_format=_Verdict, **asked)
    with client.chat.completions.stream(response_format=_Verdict, **asked) as stream:
        streamed = stream.until_done().get_final_completion()
    for completion in (whole, streamed):
        assert completion.choices[0].message.parsed.is_blue in (True, False)


async def test_async_chat_and_stream(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.create(
        model=MODEL_ID, messages=QUESTION, max_tokens=12, temperature=0, seed=1
    )
    stream = await async_client.chat.completions.create(
        model=MODEL_ID, messages=QUESTION, max_tokens=12, temperature=0, seed=1, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


def test_models_show_the_real_context(client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL_ID, messages=QUESTION, max_tokens=1)
    (model,) = client.models.list().data
    assert model.id == MODEL_ID
    assert model.max_model_len == model.meta["n_ctx"] == CONTEXT_TOKENS
    assert model.meta["n_ctx_train"] == 8192
    assert client.models.retrieve(MODEL_ID) == model
    assert client.models.retrieve("gpt-4o-mini").id == MODEL_ID


@rows(36)
def test_alias_answers_under_the_public_name(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="gpt-4o-mini", messages=QUESTION, max_tokens=1).model == MODEL_ID


@rows(36)
@lines(53)
def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as failure:
        client.chat.completions.create(model="no/such:99b", messages=QUESTION)
    assert failure.value.code == "model_not_found"
    assert failure.value.param == "model"
    assert failure.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such:99b")


@rows(1, 56)
@lines(86)
@pytest.mark.parametrize("stream", [False, True])
def test_overflow(client: openai.OpenAI, stream: bool) -> None:
    long = [{"role": "user", "content": "word " * CONTEXT_TOKENS}]
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(model=MODEL_ID, messages=long, stream=stream)
    assert failure.value.code == "context_length_exceeded"
    assert failure.value.type == "invalid_request_error"
    assert failure.value.body["n_ctx"] == CONTEXT_TOKENS
    assert failure.value.body["n_prompt_tokens"] > CONTEXT_TOKENS
    assert str(CONTEXT_TOKENS) in failure.value.message


@lines(43, 44, 48)
def test_keys(engine: str, demo_model, tmp_path) -> None:
    (alice, alice_hash), (bob, bob_hash) = new_key(), new_key()
    config = {
        "engine": {"binary": engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {"a": {"path": str(demo_model), "context": 256}, "b": {"path": str(demo_model), "context": 256}},
        "keys": [{"name": "alice", "hash": alice_hash}, {"name": "bob", "hash": bob_hash, "models": ["b"]}],
    }
    with running_gateway(config, tmp_path) as gateway:

        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=60)

        with client(alice) as of_alice, client(bob) as of_bob, client(alice + "x") as of_nobody:
            assert {model.id for model in of_alice.models.list()} == {"a", "b"}
            assert {model.id for model in of_bob.models.list()} == {"b"}
            with pytest.raises(openai.AuthenticationError) as wrong:
                of_nobody.chat.completions.create(model="a", messages=QUESTION)
            assert wrong.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                of_nobody.models.list()
            with pytest.raises(openai.PermissionDeniedError) as forbidden:
                of_bob.chat.completions.create(model="a", messages=QUESTION)
            assert forbidden.value.code == "model_not_allowed"
            answer = of_bob.chat.completions.create(model="b", messages=QUESTION, max_tokens=1)
            assert answer.usage.completion_tokens == 1
        log = "".join(gateway.log)
    assert alice not in log
    assert bob not in log
