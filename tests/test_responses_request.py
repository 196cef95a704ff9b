"""A request of the Responses API as a chat request: what becomes of each item, and what is refused with which name."""

from __future__ import annotations

from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ContextLengthExceeded, InvalidValue, RequestError, UnsupportedParameter
from app.protocol.responses import ResponsesRequest, parse_responses_request, put_in_their_words

TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True}
IMAGE = "data:image/png;base64,AAAA"


def _parse(**fields: Any) -> ResponsesRequest:
    return parse_responses_request(orjson.dumps({"model": "m", "input": "hi"} | fields))


def _messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return _parse(input=list(items), **fields).chat.messages


def _text(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def _chat_call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


# Input


def test_a_string_is_a_question() -> None:
    request = _parse().chat
    assert request.messages == [{"role": "user", "content": "hi"}]
    assert (request.model, request.stream, request.max_tokens, request.choices) == ("m", False, None, 1)
    assert request.is_plain


def test_instructions_come_first() -> None:
    assert _messages({"role": "user", "content": "hi"}, instructions="be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_one_text_is_a_string_and_several_parts_stay_parts() -> None:
    two = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert _messages(_text("user", "x"), _text("assistant", "y", "output_text"), two) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [_text("user", "q"), reasoning, _text("assistant", "let me see", "output_text"), _call(1), _call(2)]
    outputs = [{"type": "function_call_output", "call_id": f"c{number}", "output": str(number)} for number in (1, 2)]
    assert _messages(*items, *outputs, _text("assistant", "done", "output_text")) == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [_chat_call(1), _chat_call(2)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]


def test_two_texts_of_the_assistant_stay_two_messages() -> None:
    texts = [_text("assistant", text, "output_text") for text in "ab"]
    assert [message["content"] for message in _messages(*texts)] == ["a", "b"]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            {"content": [{"type": "reasoning_text", "text": "a"}], "summary": [{"type": "summary_text", "text": "s"}]},
            "a",
        ),
        ({"summary": [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]}, "s\nt"),
        ({"summary": [], "encrypted_content": "of another server"}, None),
    ],
)
def test_reasoning_that_can_be_read(item: dict[str, Any], text: str | None) -> None:
    *_, last = _messages(_text("user", "q"), {"type": "reasoning", "id": "rs"} | item)
    assert last.get("reasoning_content") == text


def test_an_output_of_a_tool_in_parts() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]}
    assert _messages(_call(1), output)[-1] == {"role": "tool", "tool_call_id": "c1", "content": "4"}


def test_a_refusal_is_what_the_assistant_said() -> None:
    said = {"role": "assistant", "type": "message", "content": [{"type": "refusal", "refusal": "no"}]}
    assert _messages(said) == [{"role": "assistant", "content": "no"}]


def test_the_output_of_one_response_is_the_input_of_the_next() -> None:
    message = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant"}
    content = [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert _messages(message | {"content": content}) == [{"role": "assistant", "content": "hello"}]


# Tools, formats, numbers


def test_functions() -> None:
    request = _parse(tools=[TOOL, {"type": "function", "name": "g"}], tool_choice="required")
    assert request.chat.fields["tools"] == [
        {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert request.chat.fields["tool_choice"] == "required"
    assert request.parameters["tools"][1] == {
        "type": "function",
        "name": "g",
        "description": None,
        "parameters": None,
        "strict": None,
    }


def test_a_named_function_is_the_only_one_and_required() -> None:
    choice = {"type": "function", "name": "g"}
    request = _parse(tools=[TOOL, TOOL | {"name": "g"}], tool_choice=choice)
    assert [tool["function"]["name"] for tool in request.chat.fields["tools"]] == ["g"]
    assert request.chat.fields["tool_choice"] == "required"
    assert request.parameters["tool_choice"] == choice
    assert len(request.parameters["tools"]) == 2


def test_allowed_tools() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    fields = _parse(tools=[TOOL, TOOL | {"name": "g"}], tool_choice=choice).chat.fields
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["g"]
    assert fields["tool_choice"] == "auto"


def test_a_schema() -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    request = _parse(text=text)
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert request.chat.fields["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert request.parameters["text"]["format"] == text["format"] | {"description": None}


@pytest.mark.parametrize(("kind", "chat"), [("text", None), ("json_object", {"type": "json_object"})])
def test_formats_without_a_schema(kind: str, chat: Any) -> None:
    assert _parse(text={"format": {"type": kind}}).chat.fields.get("response_format") == chat


def test_what_goes_down_under_another_name() -> None:
    request = _parse(max_output_tokens=7, reasoning={"effort": "low"}, temperature=0.5, top_p=0.9, stream=True, seed=3)
    assert request.chat.max_tokens == 7
    assert request.chat.stream
    assert request.chat.fields == {"reasoning_effort": "low", "temperature": 0.5, "top_p": 0.9, "seed": 3}
    assert request.parameters["max_output_tokens"] == 7
    assert request.parameters["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_log_probabilities(asked: dict[str, Any]) -> None:
    assert _parse(**asked).chat.fields["logprobs"] is True


def test_what_means_nothing_here_is_accepted_and_repeated() -> None:
    given = {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    request = _parse(store=True, service_tier="auto", include=["reasoning.encrypted_content"], **given)
    assert {key: request.parameters[key] for key in given} == given
    assert request.parameters["store"] is False
    assert request.chat.fields == {}


def test_every_optional_field_may_be_null() -> None:
    names = "instructions max_output_tokens tools tool_choice text reasoning temperature top_p stream truncation "
    names += (
        "metadata store include previous_response_id conversation background prompt user top_logprobs stream_options"
    )
    assert _parse(**dict.fromkeys(names.split())) == _parse()


def test_truncation() -> None:
    assert (_parse().truncation, _parse().parameters["truncation"]) == (None, "disabled")
    assert (_parse(truncation="auto").truncation, _parse(truncation="auto").parameters["truncation"]) == (
        "auto",
        "auto",
    )


# Refusals

_MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "input[0]"),
        ({"input": [_MESSAGE, {"type": "computer_call_output"}]}, "input[1].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
    ],
)
def test_what_there_is_not(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refusal:
        _parse(**fields)
    assert refusal.value.param == param
    assert ";" in refusal.value.message  # what to do instead


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": 5, "content": "x"}]}, "input[0].role"),
        ({"input": [_MESSAGE, {"role": "user", "content": 5}]}, "input[1].content"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [_call(1), {"type": "function_call_output", "call_id": "c1", "output": 5}]}, "input[1].output"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"max_output_tokens": 1 << 32}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": 1}, "stream"),
        ({"store": "yes"}, "store"),
        ({"include": "x"}, "include"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": ["a"]}, "metadata"),
        ({"user": "u" * 1000}, "user"),
        ({"text": "x"}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": "low"}, "reasoning"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as refusal:
        _parse(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input":"\\ud800"}', b"\xff"])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_responses_request(body)


def test_what_the_chat_finds_wrong_is_told_of_the_item() -> None:
    error = InvalidValue("'messages[1].content[0]' must be of type 'text'.", param="messages[1].content[0]")
    put_in_their_words(error, ["instructions", "input[4]"])
    assert (error.param, str(error)) == ("input[4].content[0]", "'input[4].content[0]' must be of type 'text'.")


def test_a_picture_is_passed_on_and_told_of_by_its_own_name() -> None:
    part = {"type": "input_image", "image_url": IMAGE, "detail": "low"}
    request = _parse(input=[{"role": "user", "content": [{"type": "input_text", "text": "x"}, part]}], instructions="y")
    (_, question) = request.chat.messages
    assert question["content"][1] == {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}
    error = InvalidValue("'messages[1].content[1].image_url.url' is bad.", param="messages[1].content[1].image_url.url")
    put_in_their_words(error, request.origins)
    assert (error.param, error.message) == ("input[0].content[1].image_url", f"'{error.param}' is bad.")
    with pytest.raises(InvalidValue) as refusal:
        _parse(input=[{"role": "user", "content": [part | {"image_url": "file:///etc/passwd"}]}])
    assert refusal.value.param == "input[0].content[0].image_url"


def test_an_overflow_is_one_of_the_input() -> None:
    error = ContextLengthExceeded(prompt_tokens=3, max_tokens=2, context_tokens=4)
    put_in_their_words(error)
    assert error.body()["error"]["param"] == "input"
    assert error.body()["error"]["n_prompt_tokens"] == 3


def test_deep_and_wide_values_are_refused() -> None:
    nested: Any = {}
    for _ in range(100):
        nested = {"properties": nested}
    for fields in (
        {"tools": [TOOL | {"parameters": nested}]},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": nested}}},
    ):
        with pytest.raises(InvalidValue):
            _parse(**fields)
    with pytest.raises(InvalidValue):
        _parse(input=[_MESSAGE] * 5000)


_KINDS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "function", "input_text", "output_text", "user"]
)
_NAMES = st.sampled_from(
    ["type", "role", "content", "text", "call_id", "name", "arguments", "output", "summary", "format", "schema"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats(allow_nan=False) | st.text(max_size=3) | _KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
_FIELDS = _KINDS | st.sampled_from(
    ["input", "instructions", "text", "reasoning", "tools", "tool_choice", "truncation", "metadata", "include", "store"]
)


@given(st.dictionaries(_FIELDS, _JSON, max_size=4))
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_whatever_comes_is_taken_or_refused(fields: dict[str, Any]) -> None:
    body = orjson.dumps({"model": "m", "input": "hi"} | fields, option=orjson.OPT_NON_STR_KEYS)
    try:
        request = parse_responses_request(body)
    except RequestError as refusal:
        assert refusal.message
    else:
        orjson.dumps(dict(request.parameters))
        request.chat.engine_body(max_tokens=1)
        request.chat.counting_body()
