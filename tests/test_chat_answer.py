"""The answer that a client without streaming gets: what the stream said, put together."""

from __future__ import annotations

from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol import ChatAnswer, EventTooLong, Usage
from tests.checklist import lines, rows

_quick = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
_PLACES = st.lists(st.integers(0, 1_000_000), max_size=10)
_HEAD = {"id": "chatcmpl-1", "created": 1790000000, "model": "smollm2", "system_fingerprint": "b11669-0f1e2d3c"}
_USAGE = Usage(prompt_tokens=31, completion_tokens=5, cached_tokens=3)
ROLE = {"role": "assistant", "content": None}


def _event(document: Any) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def chunk(delta: dict[str, Any], *, index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    choice = {"finish_reason": finish, "index": index, "delta": delta, **more}
    return _event({"choices": [choice], **_HEAD, "object": "chat.completion.chunk"})


def _aggregate(stream: bytes, places: list[int] | None = None) -> dict[str, Any]:
    answer = ChatAnswer()
    ends = sorted(place % (len(stream) + 1) for place in places or [])
    for start, end in zip([0, *ends], [*ends, len(stream)], strict=True):
        answer.feed(stream[start:end])
    body = orjson.loads(answer.body(_USAGE))
    assert isinstance(body, dict)
    return body


def _stream(*deltas: dict[str, Any], finish: str = "stop") -> bytes:
    chunks = [chunk(ROLE), *(chunk(delta) for delta in deltas), chunk({}, finish=finish)]
    return b"".join([*chunks, b"data: [DONE]\n\n"])


def _message(*deltas: dict[str, Any]) -> dict[str, Any]:
    message = _aggregate(_stream(*deltas))["choices"][0]["message"]
    assert isinstance(message, dict)
    return message


def _call(index: int, arguments: str, **named: str) -> dict[str, Any]:
    function = {key: value for key, value in named.items() if key == "name"} | {"arguments": arguments}
    head = {"id": named["id"], "type": "function"} if "id" in named else {}
    return {"tool_calls": [{"index": index, **head, "function": function}]}


def test_the_whole_document() -> None:
    assert _aggregate(_stream({"content": "Hel"}, {"content": "lo"})) == _HEAD | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 31,
            "completion_tokens": 5,
            "total_tokens": 36,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


@rows(32)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8), _PLACES)
@_quick
def test_contents_add_up_wherever_the_bytes_are_cut(texts: list[str], places: list[int]) -> None:
    deltas = [{"content": text} for text in texts]
    message = _aggregate(_stream(*deltas), places)["choices"][0]["message"]
    assert (message["content"] or "") == "".join(texts)


@lines(116)
def test_cjk_cut_at_every_byte() -> None:
    stream = _stream({"content": "北京"}, {"content": "🌍é"})
    for place in range(len(stream)):
        assert _aggregate(stream, [place])["choices"][0]["message"]["content"] == "北京🌍é"


@lines(115)
def test_reasoning_and_content_stay_apart() -> None:
    message = _message({"reasoning_content": "I "}, {"reasoning_content": "think"}, {"content": "so"})
    assert message == {"role": "assistant", "reasoning_content": "I think", "content": "so"}


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls"])
def test_the_reason_for_the_end(finish: str) -> None:
    assert _aggregate(_stream({"content": "x"}, finish=finish))["choices"][0]["finish_reason"] == finish


def test_comments_are_no_part_of_it() -> None:
    assert _aggregate(b":\n\n" + _stream({"content": "x"}))["choices"][0]["message"]["content"] == "x"


# Tool calls


@rows(14)
@lines(114)
def test_interleaved_tool_calls() -> None:
    message = _message(
        _call(0, "", id="aaa", name="weather"),
        _call(1, '{"q"', id="bbb", name="search"),
        _call(0, '{"city":'),
        _call(1, ': "x"}'),
        _call(0, '"Ulm"}'),
    )
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "aaa", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}},
            {"id": "bbb", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}},
        ],
    }


@rows(14)
@lines(114)
@given(st.lists(st.integers(0, 200), max_size=8))
@_quick
def test_arguments_split_anywhere_even_within_an_escape(places: list[int]) -> None:
    arguments = '{"city":"M\\u00fcnchen \\ud83c\\udf0d","note":"\\"\\\\n\\""}'
    ends = sorted(place % (len(arguments) + 1) for place in places)
    parts = [arguments[start:end] for start, end in zip([0, *ends], [*ends, len(arguments)], strict=True)]
    message = _message(_call(0, "", id="a", name="f"), *(_call(0, part) for part in parts))
    function = message["tool_calls"][0]["function"]
    assert function["arguments"] == arguments
    assert orjson.loads(function["arguments"])["city"] == "München 🌍"


@pytest.mark.parametrize("later", [{}, {"id": "aaa", "name": "f"}, {"id": "", "name": ""}])
def test_an_id_that_comes_once_or_every_time(later: dict[str, str]) -> None:
    message = _message(_call(0, "{", id="aaa", name="f"), _call(0, "}", **later))
    assert message["tool_calls"] == [{"id": "aaa", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_several_calls_in_one_delta() -> None:
    both = {
        "tool_calls": _call(0, "{}", id="a", name="f")["tool_calls"] + _call(1, "[]", id="b", name="g")["tool_calls"]
    }
    assert [call["function"]["arguments"] for call in _message(both)["tool_calls"]] == ["{}", "[]"]


def test_text_before_a_call() -> None:
    message = _message({"content": "Let me see. "}, _call(0, "{}", id="a", name="f"))
    assert message["content"] == "Let me see. "
    assert len(message["tool_calls"]) == 1


def test_calls_of_two_choices_do_not_mix() -> None:
    stream = b"".join(chunk(_call(0, str(index), id=str(index), name="f"), index=index) for index in (1, 0))
    calls = [choice["message"]["tool_calls"][0] for choice in _aggregate(stream)["choices"]]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("0", "0"), ("1", "1")]


# Several choices, log probabilities


@given(_PLACES)
@_quick
def test_two_choices(places: list[int]) -> None:
    stream = b"".join(
        [
            *(chunk(ROLE, index=1), chunk({"content": "b"}, index=1), chunk(ROLE, index=0)),
            *(chunk({"content": "a"}), chunk({}, index=1, finish="length"), chunk({"content": "A"})),
            *(chunk({}, finish="stop"), b"data: [DONE]\n\n"),
        ]
    )
    choices = _aggregate(stream, places)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["message"]["content"] for choice in choices] == ["aA", "b"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]


def test_log_probabilities_are_appended() -> None:
    def entry(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}

    stream = chunk(ROLE, logprobs=None)
    stream += b"".join(chunk({"content": text}, logprobs={"content": [entry(text)]}) for text in "ab")
    stream += chunk({"content": "c"}, logprobs={"content": [entry("c"), entry("d")], "refusal": None})
    logprobs = _aggregate(stream + chunk({}, finish="stop"))["choices"][0]["logprobs"]
    assert [item["token"] for item in logprobs["content"]] == ["a", "b", "c", "d"]


# An engine that misbehaves


@pytest.mark.parametrize(
    "event",
    [
        b"data: {\n\n",
        b"data: 5\n\n",
        b"data: [1]\n\n",
        b'data: {"choices":[5]}\n\n',
        b'data: {"choices":[{"index":"x"}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[5]}}]}\n\n',
    ],
)
def test_nonsense_is_a_value_error(event: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ChatAnswer().feed(event)


def test_an_event_without_end_is_refused() -> None:
    answer = ChatAnswer()
    with pytest.raises(EventTooLong):
        answer.feed(b"x" * (5 << 20))
