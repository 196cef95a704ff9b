"""Anthropic's requests as chat requests: what is translated, what is passed over, what is refused and how."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import RequestError
from app.protocol.messages import MessagesRequest, parse_messages_request

_HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
_TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def _parsed(**fields: Any) -> MessagesRequest:
    return parse_messages_request(orjson.dumps({"model": "m", "max_tokens": 16, "messages": _HI} | fields))


def _messages(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return _parsed(messages=list(messages), **fields).chat.messages


def _refused(**fields: Any) -> str:
    with pytest.raises(RequestError) as failure:
        _parsed(**fields)
    assert failure.value.status == 400
    return failure.value.message


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_plain_question_stays_plain() -> None:
    chat = _parsed(system="Be brief.").chat
    assert chat.messages == [{"role": "system", "content": "Be brief."}, *_HI]
    assert (chat.model, chat.max_tokens, chat.stream, chat.choices) == ("m", 16, False, 1)
    assert chat.is_plain


def test_blocks_of_text_are_joined_and_what_is_for_a_cache_is_passed_over() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = _messages(_user(_text("a") | mark, _text("b")), system=[_text("s") | mark, _text("t")])
    assert messages == [{"role": "system", "content": "s\nt"}, {"role": "user", "content": "a\nb"}]


def test_the_billing_header_is_no_part_of_the_prompt() -> None:
    messages = _messages(*_HI, system=[_text("x-anthropic-billing-header: cch=1f2e3;"), _text("You are an agent.")])
    assert messages[0] == {"role": "system", "content": "You are an agent."}


def test_turns_of_one_role_become_one() -> None:
    messages = _messages(*_HI, _user(_text("there")), {"role": "assistant", "content": "yes?"}, *_HI)
    assert messages == [
        {"role": "user", "content": "hi\nthere"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "hi"},
    ]


def test_a_round_of_tools() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"where": "北京"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    other = call | {"id": "t2", "input": {}}
    messages = _messages(
        *_HI,
        {"role": "assistant", "content": [thought, redacted, _text("I look."), call, other]},
        _user(
            {"type": "tool_result", "tool_use_id": "t1", "content": [_text("rain"), _text("wind")]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "no such place", "is_error": True},
            _text("So?"),
        ),
    )
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"where":"北京"}'}},
                {"id": "t2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "rain\nwind"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error:\nno such place"},
        {"role": "user", "content": "So?"},
    ]


def test_results_alone_are_no_question() -> None:
    (only,) = _messages(_user({"type": "tool_result", "tool_use_id": "t1"}))
    assert only == {"role": "tool", "tool_call_id": "t1", "content": ""}


def test_images_are_those_of_a_chat() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    (message,) = _messages(_user(_text("?"), _IMAGE, url))
    assert message["content"] == [
        _text("?"),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    ]
    (result,) = _messages(_user({"type": "tool_result", "tool_use_id": "t", "content": [_IMAGE]}))
    assert [part["type"] for part in result["content"]] == ["image_url"]


def test_documents_of_text_are_text() -> None:
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "body"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [_text("one"), _text("two")]}}
    found = {"type": "search_result", "title": "S", "source": "here", "content": [_text("three")]}
    assert _messages(_user(plain, blocks, found)) == [{"role": "user", "content": "T\nbody\none\ntwo\nS\nhere\nthree"}]


def test_tools_and_the_choice_among_them() -> None:
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    fields = _parsed(tools=[_TOOL | {"cache_control": {"type": "ephemeral"}}], tool_choice={"type": "any"}).chat.fields
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert fields["tool_choice"] == "required"
    two = [_TOOL, _TOOL | {"name": "go", "type": "custom"}]
    fields = _parsed(
        tools=two, tool_choice={"type": "tool", "name": "go", "disable_parallel_tool_use": True}
    ).chat.fields
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["go"]
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == ("required", False)
    for kind in ("auto", "none"):
        assert _parsed(tools=[_TOOL], tool_choice={"type": kind}).chat.fields["tool_choice"] == kind


def test_thinking_goes_to_the_template_and_its_budget_to_the_engine() -> None:
    request = _parsed(max_tokens=100, thinking={"type": "enabled", "budget_tokens": 50})
    assert request.chat.fields["chat_template_kwargs"] == {"enable_thinking": True}
    assert request.chat.fields["thinking_budget_tokens"] == 50
    assert request.shows_thinking
    assert _parsed(thinking={"type": "disabled"}).chat.fields["chat_template_kwargs"] == {"enable_thinking": False}
    assert not _parsed(thinking={"type": "adaptive", "display": "omitted"}).shows_thinking
    assert _parsed(output_config={"effort": "max"}).chat.fields["reasoning_effort"] == "high"
    assert not _parsed().chat.fields


def test_the_word_that_stops_an_answer_is_asked_for() -> None:
    request = _parsed(stop_sequences=["END", "\nHuman:"])
    assert request.stops == {"END", "\nHuman:"}
    assert request.chat.fields == {"stop": ["END", "\nHuman:"], "verbose": True}
    # With a prompt of any size in it the engine's last event might not be readable.
    long = _parsed(stop_sequences=["END"], messages=[{"role": "user", "content": "x" * (1 << 20)}])
    assert long.chat.fields == {"stop": ["END"]}


def test_a_format_is_a_response_format() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": shape}}, {"output_format": shape}):
        asked = _parsed(**fields).chat.fields["response_format"]
        assert asked["json_schema"]["schema"] == {"type": "object"}
        assert _parsed(**fields).chat.expectation
    assert "output_config.format" in _refused(output_config={"format": {"type": "xml"}})


def test_what_is_harmless_is_passed_over() -> None:
    harmless = {
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "betas": ["x"],
        "context_management": {"edits": []},
        "n_predict": -1,
        "id_slot": 3,
        "cache_prompt": False,
        "stop_sequences": None,
        "tools": [],
        "temperature": None,
    }
    assert not _parsed(**harmless).chat.fields


def test_numbers_go_through() -> None:
    fields = _parsed(temperature=0.5, top_p=0.9, top_k=40).chat.fields
    assert fields == {"temperature": 0.5, "top_p": 0.9, "top_k": 40}


def test_a_count_needs_no_limit() -> None:
    body = orjson.dumps({"model": "m", "messages": _HI})
    assert parse_messages_request(body, counts_only=True).chat.max_tokens is None
    with pytest.raises(RequestError, match="'max_tokens' is missing"):
        parse_messages_request(body)


_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "'model'"),
    "max_tokens 0": ({"max_tokens": 0}, "'max_tokens'"),
    "max_tokens true": ({"max_tokens": True}, "'max_tokens'"),
    "max_tokens wraps": ({"max_tokens": 2**32 + 2}, "'max_tokens'"),
    "no messages": ({"messages": []}, "'messages'"),
    "a message that is none": ({"messages": [1]}, "'messages[0]'"),
    "an unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role'"),
    "a role that is no name": ({"messages": [{"role": [], "content": "x"}]}, "'messages[0].role'"),
    "content 5": ({"messages": [{"role": "user", "content": 5}]}, "'messages[0].content'"),
    "no content": ({"messages": [{"role": "user"}]}, "'messages[0].content'"),
    "a block that is none": ({"messages": [_user(3)]}, "'messages[0].content[0]'"),  # type: ignore[arg-type]
    "a text without text": ({"messages": [_user({"type": "text"})]}, "'messages[0].content[0].text'"),
    "an unknown block": (
        {"messages": [_user({"type": "video"})]},
        "'messages[0].content[0]' is a block of type 'video'",
    ),
    "a pdf": (
        {"messages": [_user({"type": "document", "source": {"type": "base64", "data": "x"}})]},
        "'messages[0].content[0].source'",
    ),
    "an image that was uploaded": (
        {"messages": [_user({"type": "image", "source": {"type": "file", "file_id": "x"}})]},
        "'messages[0].content[0].source'",
    ),
    "an image without data": (
        {"messages": [_user({"type": "image", "source": {"type": "base64", "media_type": "image/png"}})]},
        "'messages[0].content[0].source.data'",
    ),
    "a user calls": ({"messages": [_user({"type": "tool_use", "id": "a", "name": "b", "input": {}})]}, "'tool_use'"),
    "a server's tool in the history": (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        "'server_tool_use'",
    ),
    "an input that is no object": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "{}"}]}]},
        "'messages[0].content[0].input'",
    ),
    "a system that is no text": ({"system": [_IMAGE]}, "'system[0]'"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    "a server's servers": ({"mcp_servers": [{"url": "http://x"}]}, "'mcp_servers'"),
    "a tool without a schema": ({"tools": [{"name": "a"}]}, "'tools[0].input_schema'"),
    "two tools of a name": ({"tools": [_TOOL, _TOOL]}, "two tools named 'look'"),
    "a choice that is none": ({"tools": [_TOOL], "tool_choice": "auto"}, "'tool_choice'"),
    "a choice of nothing": ({"tool_choice": {"type": "any"}}, "no 'tools'"),
    "a choice of an absent tool": ({"tools": [_TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
    "stops that are none": ({"stop_sequences": "END"}, "'stop_sequences'"),
    "an empty stop": ({"stop_sequences": [" \n"]}, "'stop_sequences'"),
    "too many stops": ({"stop_sequences": ["x"] * 65}, "'stop_sequences'"),
    "temperature 9": ({"temperature": 9}, "'temperature'"),
    "thinking that is none": ({"thinking": {"type": []}}, "'thinking'"),
    "thinking without a budget": ({"thinking": {"type": "enabled"}}, "'thinking.budget_tokens'"),
    "thinking beyond the answer": (
        {"thinking": {"type": "enabled", "budget_tokens": 16}},
        "'max_tokens' must be greater",
    ),
    "an unknown effort": ({"output_config": {"effort": "all"}}, "'output_config.effort'"),
    "stream 1": ({"stream": 1}, "'stream'"),
}


@pytest.mark.parametrize(("fields", "says"), _BAD.values(), ids=_BAD)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    assert says in _refused(**fields)


def test_what_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"properties": {"x": schema}}
    assert "nested" in _refused(tools=[_TOOL | {"input_schema": schema}])
    call = {"type": "tool_use", "id": "a", "name": "b", "input": schema}
    assert "nested" in _refused(messages=[{"role": "assistant", "content": [call]}])


def test_what_has_too_many_keys_is_refused() -> None:
    many = {f"k{index}": 1 for index in range(50_000)}
    call = {"type": "tool_use", "id": "a", "name": "b", "input": many}
    assert "keys" in _refused(messages=[{"role": "assistant", "content": [call]}])
    assert "keys" in _refused(tools=[_TOOL | {"input_schema": many}])
    # What nobody reads harms nobody.
    assert _parsed(**many).chat.messages == _HI


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":"\\ud800"}',
        b'{"max_tokens":1e400}',
        b"\xff\xfe",
    ],
    ids=["empty", "a list", "no JSON", "deep lists", "deep objects", "a lone surrogate", "too large", "no UTF-8"],
)
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as failure:
        parse_messages_request(body)
    assert failure.value.status == 400


_NAMES = st.sampled_from(
    [
        "type",
        "text",
        "role",
        "content",
        "source",
        "data",
        "name",
        "input",
        "id",
        "tool_use_id",
        "thinking",
        "input_schema",
        "budget_tokens",
        "format",
    ]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)
_FIELDS = st.sampled_from(
    [
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "stop_sequences",
        "output_config",
        "max_tokens",
        "stream",
        "temperature",
    ]
)


@given(st.dictionaries(_FIELDS, _JSON, max_size=5))
def test_whatever_comes_is_a_request_or_an_error_of_the_client(fields: dict[str, Any]) -> None:
    try:
        assert _parsed(**fields).chat.messages
    except RequestError as error:
        assert error.status == 400


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "system"]),
                "content": st.lists(
                    st.dictionaries(_NAMES, st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])),
                    max_size=3,
                ),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_the_blocks_are_it_is_a_request_or_an_error_of_the_client(messages: list[dict[str, Any]]) -> None:
    try:
        assert _parsed(messages=messages).chat.messages
    except RequestError as error:
        assert error.status == 400
