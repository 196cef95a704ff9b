"""What an answer must be, and what a model's template can take in."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.errors import AnswerRejected, InvalidValue, UnsupportedParameter
from app.protocol import Abilities, Usage, ask_chat, checked, parse_chat_request
from tests.checklist import lines

_SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_NO_TOOLS = Abilities(tools=False)


def _request(**fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_chat_request(orjson.dumps(body))


def _strict(schema: dict[str, Any] = _SCHEMA, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}


def _events(content: str | None, finish: str = "stop", calls: Any = None) -> list[bytes]:
    delta = {"content": content} | ({"tool_calls": calls} if calls else {})
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
    ]
    return [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def _whole(request: Any, events: list[bytes]) -> bytes:
    answer = checked(ask_chat(request)).new_answer(1)
    for event in events:
        answer.feed(event)
    return answer.body(Usage())


def _streamed(request: Any, events: list[bytes]) -> bytes:
    stream = checked(ask_chat(request)).new_stream(1)
    return b"".join(stream.feed(event) for event in events) + stream.end(Usage())


@pytest.mark.parametrize("run", [_whole, _streamed])
@pytest.mark.parametrize("content", ['{"age": 5}', ' {"age":5}\n'])
def test_an_answer_that_keeps_the_schema(run: Any, content: str) -> None:
    assert b"age" in run(_request(response_format=_strict()), _events(content))


@pytest.mark.parametrize("run", [_whole, _streamed])
@pytest.mark.parametrize(
    "content", ['{"age": "5"}', '{"age": 5, "x": 1}', "{}", "[]", "five", '{"age": 5', None, '```json\n{"age": 5}\n```']
)
def test_an_answer_that_breaks_the_schema(run: Any, content: str | None) -> None:
    with pytest.raises(AnswerRejected, match="response_format"):
        run(_request(response_format=_strict()), _events(content))


def test_a_pattern_that_the_grammar_drops_is_checked_here() -> None:
    request = _request(response_format=_strict({"type": "string", "pattern": r"^hello there indeed\!$"}))
    with pytest.raises(AnswerRejected):
        _whole(request, _events('"free text"'))


def test_an_answer_that_was_cut_says_so_by_its_finish() -> None:
    assert b'"length"' in _whole(_request(response_format=_strict()), _events('{"ag', finish="length"))


def test_only_a_strict_schema_is_a_promise() -> None:
    assert b"five" in _whole(_request(response_format=_strict(strict=False)), _events("five"))


def test_json_mode_gives_an_object() -> None:
    request = _request(response_format={"type": "json_object"})
    assert _whole(request, _events("{}"))
    for content in ("[]", "5", "five"):
        with pytest.raises(AnswerRejected):
            _whole(request, _events(content))


@pytest.mark.parametrize("run", [_whole, _streamed])
def test_a_required_call_that_did_not_come(run: Any) -> None:
    request = _request(tools=[_TOOL], tool_choice="required")
    with pytest.raises(AnswerRejected, match="without calling a tool"):
        run(request, _events("I would rather talk."))
    call = [{"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    assert b"look" in run(request, _events(None, finish="tool_calls", calls=call))


def test_a_stream_with_expectations_is_the_same_bytes() -> None:
    events = _events('{"age": 5}')
    assert _streamed(_request(response_format=_strict()), events) == b"".join(events)


def test_without_expectations_nothing_is_looked_through() -> None:
    ask = ask_chat(_request())
    assert checked(ask) is ask


@lines(77, 78)
@pytest.mark.parametrize(
    "form",
    [
        {"type": "xml"},
        {"type": 5},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"schema": []}},
        _strict({"type": "nonsense"}),
        _strict({"type": "string", "pattern": "("}),
        _strict({"$ref": "#/nowhere"}),
        _strict({"$ref": "http://127.0.0.1:1/schema.json"}),
        _strict({"$ref": "file:///etc/passwd"}),
        _strict({"description": "x" * 100_001}),
    ],
)
def test_a_format_that_nobody_can_keep(form: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        _request(response_format=form)
    assert str(caught.value.param).startswith("response_format")
    assert "passwd" not in caught.value.message or "file" in caught.value.message


def test_a_hostile_pattern_costs_nothing() -> None:
    request = _request(response_format=_strict({"type": "string", "pattern": "^(a+)+$"}))
    with pytest.raises(AnswerRejected):
        _whole(request, _events('"' + "a" * 50_000 + '!"'))


def test_tools_that_the_template_would_drop() -> None:
    request, notes = _request(tools=[_TOOL]).adapted(_NO_TOOLS)
    assert "tools" not in request.fields
    assert notes[0][0] == b"x-tools-ignored"
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        with pytest.raises(UnsupportedParameter) as caught:
            _request(tools=[_TOOL], tool_choice=choice).adapted(_NO_TOOLS)
        assert caught.value.param == "tool_choice"
    untouched, notes = _request(tools=[_TOOL]).adapted(Abilities())
    assert "tools" in untouched.fields
    assert notes == []


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("contents", "joined"),
    [
        ((None, "late"), "late"),
        (("first", "late"), "first\n\nlate"),
        (
            ("first", [{"type": "text", "text": "late"}]),
            [{"type": "text", "text": "first"}, {"type": "text", "text": "late"}],
        ),
    ],
)
def test_a_late_system_message_joins_the_first(contents: Any, joined: Any) -> None:
    first, late = contents
    head = [{"role": "system", "content": first}] if first else []
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages = [*head, *turns, {"role": "developer", "content": late}, {"role": "user", "content": "c"}]
    request, _ = _request(messages=messages).adapted(Abilities(late_system=False))
    assert request.messages == [{"role": "system", "content": joined}, *turns, {"role": "user", "content": "c"}]
    kept, _ = _request(messages=messages).adapted(Abilities())
    assert [message["role"] for message in kept.messages][-2] == "system"
