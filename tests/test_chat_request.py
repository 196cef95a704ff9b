"""What a chat request may say, what of it reaches the engine, and what is refused by name."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import orjson
import pytest

from app.errors import InvalidValue, RequestError
from app.protocol import ChatRequest, parse_chat_request
from tests.checklist import lines, rows

USER: dict[str, Any] = {"role": "user", "content": "hi"}
# What goes down whatever the client says; the gateway's own values, never the client's.
_ALWAYS_SENT = {"messages", "max_tokens", "stream", "stream_options", "return_progress"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "search"}}


def _body(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [USER], **fields})


def _parse(**fields: Any) -> ChatRequest:
    return parse_chat_request(_body(**fields))


def _sent(request: ChatRequest, *, max_tokens: int = 7) -> dict[str, Any]:
    document = orjson.loads(request.engine_body(max_tokens=max_tokens))
    assert isinstance(document, dict)
    return document


def _refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as refusal:
        parse_chat_request(body)
    assert refusal.value.status == 400
    return refusal.value


# The body as JSON

_NOT_JSON = {
    "empty": b"",
    "blank": b" \n",
    "array": b"[]",
    "text": b'"x"',
    "null": b"null",
    "invalid UTF-8": b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "lone surrogate": rb'{"model":"m","messages":[{"role":"user","content":"\ud800"}]}',
    "NaN": b'{"model":"m","temperature":NaN}',
    "Infinity": b'{"model":"m","temperature":Infinity}',
    "trailing text": _body() + b" x",
    "two documents": _body() + _body(),
    "cut": _body()[:-1],
    "UTF-16": _body().decode().encode("utf-16"),
    "only a BOM": b"\xef\xbb\xbf",
}


@lines(1, 2, 4, 5, 6, 7)
@pytest.mark.parametrize("body", _NOT_JSON.values(), ids=_NOT_JSON)
def test_what_is_not_one_json_object_is_refused(body: bytes) -> None:
    refusal = _refused(body)
    assert refusal.body()["error"]["type"] == "invalid_request_error"
    assert len(refusal.message) < 400


@lines(6)
def test_a_number_beyond_all_numbers_is_refused() -> None:
    _refused(_body().replace(b'"model"', b'"temperature":1e400,"model"', 1))


@lines(3)
def test_a_bom_is_skipped() -> None:
    assert parse_chat_request(b"\xef\xbb\xbf" + _body()).model == "m"


@lines(8)
def test_the_last_of_two_equal_keys_counts_here_and_in_the_engine() -> None:
    request = parse_chat_request(_body()[:-1] + b',"max_tokens":1,"max_tokens":3,"n":2,"n":1}')
    assert request.max_tokens == 3
    assert _sent(request)["n"] == 1


@lines(9, 11)
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("field", [b"tools", b"response_format", b"unknown"])
def test_nesting_of_100_000_is_refused(opening: bytes, field: bytes) -> None:
    started = time.perf_counter()
    _refused(b'{"model":"m","' + field + b'":' + opening * 100_000)
    closed = {b"[": b"]", b'{"a":': b"1}"}[opening]
    _refused(b'{"model":"m","' + field + b'":' + opening * 100_000 + closed * 100_000 + b"}")
    assert time.perf_counter() - started < 1


def _nested(depth: int) -> dict[str, Any]:
    """An object that is ``depth`` objects deep."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@lines(9, 11)
@pytest.mark.parametrize("field", ["response_format", "chat_template_kwargs"])
def test_nesting_of_65_is_refused(field: str) -> None:
    _refused(_body(**{field: _nested(64)}))
    assert _sent(_parse(**{field: _nested(63)}))[field] == _nested(63)


@lines(10)
def test_50_000_keys_cost_nothing_and_go_nowhere() -> None:
    body = _body(**{f"key{index}": index for index in range(50_000)})
    started = time.perf_counter()
    # To refuse them would be as good.
    with contextlib.suppress(RequestError):
        assert set(_sent(parse_chat_request(body))) == _ALWAYS_SENT
    assert time.perf_counter() - started < 0.2


@lines(10)
@pytest.mark.parametrize("field", ["response_format", "chat_template_kwargs", "logit_bias"])
def test_an_object_of_50_000_keys_does_not_reach_the_engine(field: str) -> None:
    _refused(_body(**{field: {f"key{index}": 1 for index in range(50_000)}}))


def test_a_message_of_50_000_keys_does_not_reach_the_engine() -> None:
    _refused(_body(messages=[USER | {f"key{index}": 1 for index in range(50_000)}]))


# Refused, by the name of the field

_Table = list[tuple[dict[str, Any], str]]


def _each(name: str, *values: Any, param: str = "", **more: Any) -> _Table:
    """A row per value of one field, beside ``more``; ``param`` where the refusal names something else."""
    return [({name: value, **more}, param or name) for value in values]


def _users(name: str, *values: Any) -> list[Any]:
    return [USER | {name: value} for value in values]


def _each_message(param: str, *messages: Any, before: tuple[Any, ...] = ()) -> _Table:
    return [({"messages": [*before, message]}, param) for message in messages]


_TOO_MANY = [USER] * 4097
_NO_TOKENS: tuple[Any, ...] = (0, -1, -5, 1.9, 1.0, "3", True, 4294967298, 1 << 31, 1 << 63, [], {})
_NO_TEXT = (*("hi", {"type": "text"}, {"type": "text", "text": 5}, {"type": "file", "file": {}}),)
_NO_URL = (*({"url": url} for url in ("file:///etc/passwd", "x.png", 5, None)), {}, "x")
_NO_AUDIO = ({"data": 5, "format": "wav"}, {"data": ""}, {"data": "", "format": "exe"}, {}, "x")
_ABSENT = {"type": "function", "function": {"name": "absent"}}
_REFUSED: _Table = [
    *_each("model", None, "", 5, [], {}),
    *_each("messages", None, {}, [], "hi", _TOO_MANY),
    *_each_message("messages[0]", 1, None, "hi", []),
    *_each_message("messages[0].role", *_users("role", 5, None, "", "robot", [], {})),
    *_each_message("messages[0].role", {"content": "hi"}),
    *_each_message("messages[1].content", *_users("content", 5, None, True, {}), before=(USER,)),
    *_each_message("messages[0].content", {"role": "user"}),
    *_each_message("messages[0].content[0]", *_users("content", *([part] for part in _NO_TEXT))),
    *_each_message(
        "messages[0].content[0].image_url.url",
        *_users("content", *([{"type": "image_url", "image_url": image}] for image in _NO_URL)),
    ),
    *_each_message(
        "messages[0].content[0].input_audio",
        *_users("content", *([{"type": "input_audio", "input_audio": audio}] for audio in _NO_AUDIO)),
    ),
    *_each("max_tokens", *_NO_TOKENS),
    *_each("max_completion_tokens", *_NO_TOKENS),
    *_each("temperature", 9, 2.1, -1, "1", True, []),
    *_each("top_p", -0.1, 1.1, "1", True),
    *_each("min_p", -0.1, 1.1, "x"),
    *_each("typical_p", -0.1, 1.1),
    *_each("presence_penalty", -2.1, 2.1, "0"),
    *_each("frequency_penalty", -2.1, 2.1, "0"),
    *_each("repeat_penalty", -1, 11, "x"),
    *_each("n", 0, -1, 129, 1.0, "1", True),
    *_each("seed", 1.5, "1", True, 1 << 63),
    *_each("top_k", -1, 1 << 21, 1.5),
    *_each("repeat_last_n", -2, "1"),
    *_each("top_logprobs", 21, -1, 1.5, True, "5", logprobs=True),
    *_each("top_logprobs", 5),
    *_each("top_logprobs", 5, logprobs=False),
    *_each("logprobs", 1, "true", []),
    *_each("stop", ["a"] * 5, [5], 5, True, {}, [None]),
    *_each("stream", 1, "true", []),
    *_each("stream_options", 1, [], "x", stream=True),
    *_each("stream_options", {"include_usage": 1}, stream=True, param="include_usage"),
    *_each("tools", {}, [1], [{}], [{"function": {}}], [{"function": {"name": 5}}], [TOOL] * 129),
    *_each("tool_choice", "any", 5, True, [], {}, {"function": {}}, _ABSENT, tools=[TOOL]),
    *_each("tool_choice", TOOL),
    *_each("response_format", "json", [], 5),
    *_each("logit_bias", [], "x"),
    *_each("chat_template_kwargs", [], "x"),
    *_each("reasoning_effort", [], 5),
    *_each("ignore_eos", 1, "true"),
    *_each("parallel_tool_calls", 1, "true"),
    # Older names, which the engine would ignore without a word.
    *_each("functions", [TOOL["function"]]),
    *_each("function_call", "auto"),
]


@lines(52, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 70, 71, 72, 74, 75, 77)
@pytest.mark.parametrize(("fields", "param"), _REFUSED)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    refusal = _refused(_body(**fields))
    assert isinstance(refusal, InvalidValue)
    assert refusal.param == param
    assert refusal.code == "invalid_value"
    assert param.partition("[")[0] in refusal.message


def test_a_field_of_the_model_that_is_absent() -> None:
    assert _refused(orjson.dumps({"messages": [USER]})).param == "model"
    assert _refused(orjson.dumps({"model": "m"})).param == "messages"


# Accepted

_ACCEPTED: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0, 0.0, 1, 2, 2.0)),
    *({"top_p": value} for value in (0, 1, 0.5)),
    *({"frequency_penalty": value} for value in (-2, 2.0)),
    *({"seed": value} for value in (0, -1, -(1 << 63), (1 << 63) - 1)),
    *({"n": value} for value in (1, 128)),
    *({"stop": value} for value in ("", "x", [], ["a", "b", "c", "d"])),
    *({"logprobs": True, "top_logprobs": value} for value in (0, 20)),
    {"logprobs": False},
    {"tools": [TOOL] * 128},
    *({"tools": [TOOL], "tool_choice": value} for value in ("none", "auto", "required")),
    *({"response_format": {"type": value}} for value in ("text", "json_object")),
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    {"logit_bias": {"5": -100}},
    {"reasoning_effort": "low"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"parallel_tool_calls": False, "ignore_eos": True, "top_k": 0, "repeat_last_n": -1, "min_p": 0.05},
]


@pytest.mark.parametrize("fields", _ACCEPTED)
def test_a_right_value_reaches_the_engine_as_it_is(fields: dict[str, Any]) -> None:
    sent = _sent(_parse(**fields))
    assert {key: sent[key] for key in fields} == fields


@lines(65)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 1}, 1),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
        ({"max_tokens": (1 << 31) - 1}, (1 << 31) - 1),
    ],
)
def test_the_token_limit(fields: dict[str, Any], expected: int | None) -> None:
    request = _parse(**fields)
    assert request.max_tokens == expected
    sent = _sent(request, max_tokens=7)
    assert sent["max_tokens"] == 7
    assert "max_completion_tokens" not in sent


_NULLABLE = (
    *("temperature", "top_p", "n", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("response_format", "parallel_tool_calls", "user", "metadata", "reasoning_effort", "functions", "function_call"),
)


@lines(67)
def test_every_optional_field_may_be_null() -> None:
    request = _parse(**dict.fromkeys(_NULLABLE))
    assert (request.stream, request.include_usage, request.max_tokens, request.choices) == (False, False, None, 1)
    assert request.fields == {}


@pytest.mark.parametrize(
    ("fields", "stream", "include_usage"),
    [
        ({"stream": True}, True, False),
        ({"stream": True, "stream_options": None}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, True),
        ({"stream": True, "stream_options": {"include_usage": False}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": True}}, True, False),
        ({"stream": False, "stream_options": {"include_usage": True}}, False, False),
    ],
)
def test_the_engine_always_streams_with_usage(fields: dict[str, Any], stream: bool, include_usage: bool) -> None:
    request = _parse(**fields)
    assert (request.stream, request.include_usage) == (stream, include_usage)
    sent = _sent(request)
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}


# Kept from the engine

_PRIVATE = (
    *("n_predict", "id_slot", "n_probs", "cache_prompt", "n_keep", "n_discard", "n_cmpl", "return_tokens"),
    *("return_progress", "timings_per_token", "sse_ping_interval", "verbose", "response_fields", "lora", "grammar"),
    *("grammar_lazy", "grammar_triggers", "preserved_tokens", "json_schema", "chat_parser", "chat_format"),
    *("parse_tool_calls", "generation_prompt", "message_delimiters", "samplers", "backend_sampling"),
    *("post_sampling_probs", "t_max_predict_ms", "n_indent", "reasoning_format", "reasoning_control"),
    *("reasoning_budget_tokens", "thinking_budget_tokens", "add_generation_prompt", "continue_final_message"),
    *("prompt", "prefill", "model", "user", "metadata", "store", "service_tier", "safety_identifier", "__proto__"),
)


@lines(66)
@pytest.mark.parametrize("value", [-1, "x", True, {"a": 1}])
def test_private_names_never_reach_the_engine(value: Any) -> None:
    request = _parse(**(dict.fromkeys(_PRIVATE, value) | {"model": "m", "max_tokens": 5, "temperature": 1}))
    sent = _sent(request)
    assert set(sent) == _ALWAYS_SENT | {"temperature"}
    assert sent["return_progress"] is True
    assert set(orjson.loads(request.counting_body())) == {"messages"}


def test_what_is_counted_is_what_is_rendered() -> None:
    rendered = {
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"a": 1},
        "reasoning_effort": "low",
    }
    request = _parse(temperature=1, stop="x", **rendered)
    assert orjson.loads(request.counting_body()) == {"messages": [USER], **rendered}


# Messages


@rows(41)
@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
        {"role": "tool", "content": "42", "tool_call_id": "a"},
        {"role": "user", "content": "a\x00b", "name": "eve"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": ""},
    ],
)
def test_messages_reach_the_engine_untouched(message: dict[str, Any]) -> None:
    request = _parse(messages=[USER, message])
    assert _sent(request)["messages"] == [USER, message]
    assert orjson.loads(request.counting_body())["messages"] == [USER, message]


def test_developer_is_system() -> None:
    request = _parse(messages=[{"role": "developer", "content": "be brief"}, USER])
    assert _sent(request)["messages"] == [{"role": "system", "content": "be brief"}, USER]
    assert request.is_plain


@lines(73)
def test_a_named_tool_is_the_only_one_and_required() -> None:
    choice = {"type": "function", "function": {"name": "search"}}
    sent = _sent(_parse(tools=[TOOL, OTHER_TOOL], tool_choice=choice))
    assert (sent["tools"], sent["tool_choice"]) == ([OTHER_TOOL], "required")


_ASSISTANT = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({}, True),
        ({"temperature": 0, "stop": "x", "seed": 1, "logprobs": True}, True),
        ({"messages": [{"role": "system", "content": "s"}, USER, _ASSISTANT, USER]}, True),
        ({"messages": [USER | {"name": "eve"}]}, False),
        ({"messages": [USER | {"content": [{"type": "text", "text": "a"}]}]}, False),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, False),
        ({"messages": [USER, _ASSISTANT | {"content": None}]}, False),
        ({"messages": [USER, {"role": "assistant"}]}, False),
        ({"messages": [USER, {"role": "assistant", "tool_calls": []}, USER]}, False),
        ({"messages": [USER, _ASSISTANT | {"reasoning_content": "y"}]}, False),
        ({"tools": [TOOL]}, False),
        ({"tool_choice": "none"}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"chat_template_kwargs": {"a": 1}}, False),
        ({"reasoning_effort": "low"}, False),
    ],
)
def test_only_plain_requests_may_be_bounded(fields: dict[str, Any], is_plain: bool) -> None:
    assert _parse(**fields).is_plain is is_plain


def test_content_is_measured_in_utf8() -> None:
    request = _parse(messages=[USER, {"role": "assistant", "content": "北京🌍é\x00"}])
    assert request.content_bytes == 2 + 6 + 4 + 2 + 1
