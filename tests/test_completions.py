"""Text completions on real engines: strings, arrays, tokens, exact sums, and refusals instead of silence."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import orjson
import pytest

from app.errors import InvalidValue, RequestError
from app.protocol import CompletionAnswer, CompletionStream, Usage, UsageMeter, parse_completion_request
from tests.checklist import lines, rows
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.gateway import GatewayProcess

PROMPT = "The capital of France is"


@pytest.fixture
def client(gateway: GatewayProcess):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(gateway: GatewayProcess, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/completions", json={"model": MODEL_ID, **body}, timeout=180)


def tokens_of(client: openai.OpenAI, prompt: str) -> int:
    return client.completions.create(model=MODEL_ID, prompt=prompt, max_tokens=1).usage.prompt_tokens


def test_a_prompt_is_continued(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_ID, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.model == MODEL_ID
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_the_stream_is_the_answer_with_one_usage_chunk_at_the_end(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL_ID, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    without = list(client.completions.create(**fields, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in without)
    assert without[-1].choices[0].finish_reason == "length"


PROMPTS = (PROMPT, "One, two,", "The sky")


@lines(79)
def test_79_an_array_of_prompts_has_a_choice_each_and_their_usage_summed(client: openai.OpenAI) -> None:
    alone = [
        client.completions.create(model=MODEL_ID, prompt=prompt, max_tokens=4, temperature=0) for prompt in PROMPTS
    ]
    answer = client.completions.create(model=MODEL_ID, prompt=list(PROMPTS), max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].text == alone[0].choices[0].text
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert answer.usage.completion_tokens == 12


@lines(79)
def test_79_a_streamed_array_has_one_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL_ID,
            prompt=list(PROMPTS),
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {chunk.choices[0].index for chunk in chunks[:-1]} == {0, 1, 2}
    assert [index for index, chunk in enumerate(chunks) if chunk.usage] == [len(chunks) - 1]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == sum(tokens_of(client, prompt) for prompt in PROMPTS)


def test_choices_of_one_prompt_count_it_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_ID, prompt=PROMPT, max_tokens=4, n=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens == tokens_of(client, PROMPT)
    assert answer.usage.completion_tokens == 8


def test_tokens_are_prompts_too(gateway: GatewayProcess) -> None:
    one = post(gateway, prompt=[504, 3575], max_tokens=2).json()
    assert one["usage"]["prompt_tokens"] == 2
    two = post(gateway, prompt=[[504, 3575], [504]], max_tokens=2).json()
    assert two["usage"]["prompt_tokens"] == 3
    assert len(two["choices"]) == 2


@lines(80)
@pytest.mark.parametrize("token", [-5, 49152, 1 << 31, 1.0, True, "a"])
def test_80_a_token_that_the_model_does_not_have_is_refused(token: object, gateway: GatewayProcess) -> None:
    for prompt in ([504, token], [[504, token]]):
        answer = post(gateway, prompt=prompt, max_tokens=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("prompt")


@pytest.mark.slow
def test_the_edge_of_the_context(gateway: GatewayProcess) -> None:
    full = [504] * (CONTEXT_TOKENS - 1)
    assert post(gateway, prompt=full, max_tokens=1).json()["usage"]["total_tokens"] == CONTEXT_TOKENS
    for prompt, limit in ((full, 2), ([*full, 504], 1), ([[504], full], 2)):
        refused = post(gateway, prompt=prompt, max_tokens=limit)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert error["n_ctx"] == CONTEXT_TOKENS


@pytest.mark.slow
def test_the_gate_counts_as_the_engine_does(gateway: GatewayProcess) -> None:
    prompt = "<|im_start|>user\nHi 🌍 <s>\u0000</s>" + " naïve" * 280
    refused = post(gateway, prompt=prompt, max_tokens=CONTEXT_TOKENS)
    used = post(gateway, prompt=prompt, max_tokens=1)
    assert refused.json()["error"]["n_prompt_tokens"] == used.json()["usage"]["prompt_tokens"]
    assert used.headers["x-context-limit"] == str(CONTEXT_TOKENS)


@rows(1)
@pytest.mark.slow
def test_row_1_a_prompt_is_answered_whole_or_refused(gateway: GatewayProcess) -> None:
    secret = "The secret word is tangerine."
    for words in (0, 400, 5000):
        prompt = secret + " word" * words + " The secret word is"
        answer = post(gateway, prompt=prompt, max_tokens=4, temperature=0)
        if answer.status_code == 200:
            assert answer.json()["usage"]["prompt_tokens"] > words
        else:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.status_code == 400


@lines(76)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("best_of", 2),
        ("suffix", "end"),
        ("logprobs", 1),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [""]),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", ["a", 5]),
        ("prompt", ["a"] * 129),
        ("max_tokens", 0),
        ("n", 0),
    ],
)
def test_76_what_the_engine_would_ignore_or_misread_is_refused(field: str, value: object) -> None:
    body = orjson.dumps({"model": MODEL_ID, "prompt": "a", field: value})
    with pytest.raises(InvalidValue) as refused:
        parse_completion_request(body)
    assert (refused.value.param or "").startswith(field)


@lines(76)
def test_76_over_http(gateway: GatewayProcess) -> None:
    for field, value in (("echo", True), ("best_of", 3), ("suffix", "x")):
        answer = post(gateway, prompt="a", **{field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_fields_that_ask_for_nothing_pass() -> None:
    nothing = {"echo": False, "best_of": 1, "suffix": None, "logprobs": None}
    request = parse_completion_request(orjson.dumps({"model": "m", "prompt": "a", **nothing}))
    assert orjson.loads(request.engine_body(max_tokens=3, slot=1)) == {
        "prompt": "a",
        "id_slot": 1,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }


def test_several_prompts_with_several_choices_are_refused() -> None:
    with pytest.raises(RequestError, match="single prompt"):
        parse_completion_request(orjson.dumps({"model": "m", "prompt": ["a", "b"], "n": 2}))


def test_prompts_take_the_slots_that_there_are() -> None:
    request = parse_completion_request(orjson.dumps({"model": "m", "prompt": ["a"] * 5}))
    assert (request.choices, request.slots_at_once(2), request.slots_at_once(8)) == (5, 2, 5)


def event(index: int, text: str, *, usage: tuple[int, int] | None = None) -> bytes:
    choice = {"text": text, "index": index, "logprobs": None, "finish_reason": "stop" if usage else None}
    chunk: dict[str, Any] = {"choices": [choice], "object": "text_completion", "id": "c"}
    if usage:
        chunk |= {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}, "timings": {"prompt_n": 1}}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def progress(index: int, processed: int) -> bytes:
    chunk = {"choices": [{"text": "", "index": index}], "prompt_progress": {"processed": processed}}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def test_an_event_that_is_no_chunk_does_not_go_out() -> None:
    null, text = b"data: null\n\n", event(0, 'data: null\n\n"')
    assert CompletionStream().feed(null + text) == text
    answer = CompletionAnswer()
    answer.feed(null + text)
    assert orjson.loads(answer.body(Usage()))["choices"][0]["text"] == 'data: null\n\n"'


def test_prompts_broken_off_are_charged_for_what_was_read() -> None:
    meter = UsageMeter(keep_usage=False, choices=2, prompts=2, has_roles=False)
    meter.feed(progress(0, 10) + progress(1, 20) + event(0, "a") + event(1, "b") + event(1, "c"))
    assert (meter.prompt_tokens, meter.generated_tokens) == (30, 3)
    meter.feed(event(0, "", usage=(12, 1)))
    # What is known of one is kept beside what was seen of the other.
    assert meter.prompt_tokens == 32
    assert meter.generated_tokens >= 3
    meter.feed(event(1, "", usage=(20, 2)) + b"data: [DONE]\n\n")
    assert meter.complete
    assert meter.usage == Usage(prompt_tokens=32, completion_tokens=3)
