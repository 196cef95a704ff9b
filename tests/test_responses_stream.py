"""The events and the document of a response: the order, the numbers, and the same whatever the segmentation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.errors import EngineGone, UpstreamFailed
from app.protocol import Usage
from app.protocol.responses import ResponseAnswer, ResponsesRequest, ResponseStream, parse_responses_request
from tests.chat_stream import DONE, chunk, recorded

_quick = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
USAGE = Usage(prompt_tokens=31, completion_tokens=5, cached_tokens=3)
TEXT = [*recorded({"content": "Hel"}, {"content": "lo"}), chunk({}, "stop"), DONE]


def _request(**fields: Any) -> ResponsesRequest:
    return parse_responses_request(orjson.dumps({"model": "alias", "input": "hi", "stream": True} | fields))


def _read(stream: bytes, *, check: bool = True) -> list[dict[str, Any]]:
    """The events, each whole, named as its data says, and one that the SDK knows."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if check:
            _EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _events(pieces: Iterable[bytes], *, check: bool = True, **fields: Any) -> list[dict[str, Any]]:
    stream = ResponseStream(_request(**fields))
    return _read(b"".join([*map(stream.feed, pieces), stream.end(USAGE)]), check=check)


def _document(pieces: Iterable[bytes], **fields: Any) -> dict[str, Any]:
    answer = ResponseAnswer(_request(**fields))
    for piece in pieces:
        answer.feed(piece)
    document = orjson.loads(answer.body(USAGE))
    Response.model_validate(document)
    assert isinstance(document, dict)
    return document


def _anonymous(value: Any) -> Any:
    """Without what differs from one response to the next."""
    text = orjson.dumps(value).decode()
    identity = re.search(r"resp_([0-9a-f]{32})", text)
    text = re.sub(r'"(created_at|completed_at)":\d+', r'"\1":1', text)
    return orjson.loads(text.replace(identity[1], "x") if identity else text)


def _kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def _tool_call(arguments: str, index: int | None = 0, **more: Any) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    place = {} if index is None else {"index": index}
    return {"tool_calls": [{**place, **more, "function": {**name, "arguments": arguments}}]}


def test_a_text() -> None:
    events = _events(TEXT)
    assert _kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo"]
    response = events[-1]["response"]
    assert response["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["usage"] == {
        "input_tokens": 31,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 36,
    }
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["model"] == "m"  # as the engine calls it, not the alias


def test_nothing_goes_out_before_the_engine_has_begun() -> None:
    stream = ResponseStream(_request())
    assert stream.feed(b"") == stream.feed(b": ping\n\n") == b""


def test_every_item_that_was_added_is_done_and_in_the_end() -> None:
    deltas = [{"reasoning_content": "hm"}, {"content": "so"}, _tool_call("{}", id="a", name="f")]
    events = _events([*recorded(*deltas), chunk({}, "tool_calls"), DONE])
    added = {event["output_index"]: event["item"] for event in events if event["type"].endswith("item.added")}
    done = {event["output_index"]: event["item"] for event in events if event["type"].endswith("item.done")}
    assert [added[place]["type"] for place in sorted(added)] == ["reasoning", "message", "function_call"]
    assert {place: item["id"] for place, item in added.items()} == {place: item["id"] for place, item in done.items()}
    assert [done[place] for place in sorted(done)] == events[-1]["response"]["output"]


def test_reasoning() -> None:
    deltas = [{"reasoning_content": "I "}, {"reasoning_content": "think"}, {"content": "so"}]
    events = _events([*recorded(*deltas), chunk({}, "stop"), DONE])
    assert _kinds(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    response = events[-1]["response"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert response["output"][0]["summary"] == []
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_cut_short_is_incomplete(finish: str, reason: str) -> None:
    stream = [*recorded({"content": "Hel"}), chunk({}, finish), DONE]
    last = _events(stream)[-1]
    assert last["type"] == "response.incomplete"
    for response in (last["response"], _document(stream)):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert response["output"][0]["status"] == ("incomplete" if finish == "length" else "completed")
        assert response["completed_at"] is None
        assert response["usage"]["output_tokens"] == 5


def test_an_empty_answer_has_a_message() -> None:
    events = _events([*recorded(), chunk({}, "stop"), DONE])
    assert _kinds(events)[2:] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_log_probabilities() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "logprobs": {"content": [entry]}}
    piece = b"data: " + orjson.dumps({"choices": [choice], "id": "chatcmpl-1", "model": "m"}) + b"\n\n"
    events = _events([*recorded(), piece, chunk({}, "stop"), DONE])
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [[entry]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry]


# Tool calls, as different engines stream them

_RECORDINGS: dict[str, list[dict[str, Any]]] = {
    "id in the first delta only": [_tool_call("", id="a", name="f"), _tool_call('{"x"'), _tool_call(": 1}")],
    "id and name in every delta": [_tool_call(part, id="a", name="f") for part in ("", '{"x"', ": 1}")],
    "no index": [_tool_call("", None, id="a", name="f"), _tool_call('{"x": 1}', None)],
    "arguments before the name": [_tool_call('{"x"', id="a"), _tool_call(": 1}", name="f")],
    "first index 1": [_tool_call("", 1, id="a", name="f"), _tool_call('{"x": 1}', 1)],
    "cut within an escape": [_tool_call('{"x"', id="a", name="f"), _tool_call(": "), _tool_call("1}")],
}


@pytest.mark.parametrize("deltas", _RECORDINGS.values(), ids=_RECORDINGS)
def test_a_call(deltas: list[dict[str, Any]]) -> None:
    stream = [*recorded(*deltas), chunk({}, "tool_calls"), DONE]
    events = _events(stream, tools=[_TOOL])
    assert _kinds(events)[2] == "output_item.added"
    assert set(_kinds(events)[3:-3]) == {"function_call_arguments.delta"}
    assert _kinds(events)[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(event["delta"] for event in events if "delta" in event) == '{"x": 1}'
    for response in (events[-1]["response"], _document(stream, tools=[_TOOL])):
        (call,) = response["output"]
        assert {key: call[key] for key in ("type", "call_id", "name", "arguments", "status")} == {
            "type": "function_call",
            "call_id": "a",
            "name": "f",
            "arguments": '{"x": 1}',
            "status": "completed",
        }


def test_interleaved_calls_do_not_mix() -> None:
    deltas = [
        _tool_call("", 0, id="a", name="f"),
        _tool_call('{"q"', 1, id="b", name="g"),
        _tool_call('{"c":', 0),
        _tool_call(": 1}", 1),
        _tool_call("2}", 0),
    ]
    output = _events([*recorded(*deltas), chunk({}, "tool_calls"), DONE])[-1]["response"]["output"]
    assert [(call["call_id"], call["arguments"]) for call in output] == [("a", '{"c":2}'), ("b", '{"q": 1}')]


def test_a_call_cut_short_is_incomplete_and_the_one_before_is_not() -> None:
    deltas = [_tool_call("{}", 0, id="a", name="f"), _tool_call('{"q"', 1, id="b", name="g")]
    response = _document([*recorded(*deltas), chunk({}, "length"), DONE])
    assert [call["status"] for call in response["output"]] == ["completed", "incomplete"]


def test_a_call_without_an_id_gets_one() -> None:
    (call,) = _document([*recorded(_tool_call("{}", name="f")), chunk({}, "tool_calls"), DONE])["output"]
    assert re.fullmatch(r"call_[0-9a-f]{36}", call["call_id"])


# Any segmentation


@given(
    st.lists(
        st.tuples(st.sampled_from(["content", "reasoning_content"]), st.text(st.characters(exclude_categories=["Cs"]))),
        max_size=8,
    ),
    st.lists(st.integers(0, 1_000_000), max_size=10),
)
@_quick
def test_any_segmentation_gives_the_same_events_and_the_same_document(
    deltas: list[tuple[str, str]], places: list[int]
) -> None:
    call = [_tool_call("{", id="a", name="f"), _tool_call("}")]
    stream = b"".join([*recorded(*({kind: text} for kind, text in deltas), *call), chunk({}, "stop"), DONE])
    ends = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(ends)]
    whole = _anonymous(_events([stream], check=False))
    assert _anonymous(_events(pieces, check=False)) == whole
    assert _anonymous(_document(pieces)) == whole[-1]["response"]
    texts = [item["content"][0]["text"] for item in whole[-1]["response"]["output"][:-1]]
    assert "".join(texts) == "".join(text for _, text in deltas)


# Failures


def test_an_answer_that_breaks_off() -> None:
    stream = ResponseStream(_request())
    pieces = [stream.feed(piece) for piece in recorded({"content": "Hel"})]
    events = _read(b"".join([*pieces, stream.failure(EngineGone("the engine died; send it again", streamed=True))]))
    assert _kinds(events)[-2:] == ["failed", "error"]
    failed, error = events[-2]["response"], events[-1]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"][0]["status"] == "incomplete"
    assert failed["output"][0]["content"][0]["text"] == "Hel"
    assert (error["code"], error["message"]) == ("upstream_failed", "the engine died; send it again")
    assert error["error"]["code"] == "upstream_failed"


def test_an_answer_that_never_began() -> None:
    events = _read(ResponseStream(_request()).failure(EngineGone("gone")))
    assert _kinds(events) == ["error"]


@pytest.mark.parametrize("event", [b"data: {\n\n", b"data: 5\n\n", b'data: {"choices":[5]}\n\n'])
def test_nonsense_breaks_the_answer_off(event: bytes) -> None:
    with pytest.raises(UpstreamFailed):
        ResponseStream(_request()).feed(event)
    with pytest.raises(UpstreamFailed):
        ResponseAnswer(_request()).feed(event)
