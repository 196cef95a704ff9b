"""The engine's stream in Anthropic's words: as events and as a document, which say the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ContextLengthExceeded, EngineGone, GatewayError, UpstreamFailed
from app.protocol import Usage, UsageMeter
from app.protocol.messages import MessageAnswer, MessageStream, error_document
from tests.chat_stream import DONE, chunk, recorded, usage_chunk
from tests.messages_events import events, folded

_STOPS = frozenset({"END", "STOP"})


def _finished(*deltas: dict[str, Any], reason: str = "stop", **more: Any) -> list[bytes]:
    usage = usage_chunk(prompt=40, completion=7, cached=30)
    return [*recorded(*deltas), chunk({}, reason, **more), usage, DONE]


def _streamed(pieces: Sequence[bytes], **options: Any) -> bytes:
    """As in an exchange: through the meter."""
    meter, stream = UsageMeter(keep_usage=False), MessageStream(input_tokens=40, stops=_STOPS, **options)
    out = b"".join(stream.feed(body) for piece in pieces if (body := meter.feed(piece)))
    assert meter.complete
    return out + stream.end(meter.usage or Usage())


def _collected(pieces: Sequence[bytes], **options: Any) -> dict[str, Any]:
    meter, answer = UsageMeter(keep_usage=False), MessageAnswer(stops=_STOPS, **options)
    for piece in pieces:
        answer.feed(meter.feed(piece))
    document: dict[str, Any] = orjson.loads(answer.body(meter.usage or Usage()))
    return document


def _both(*deltas: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The message, which must be the same either way."""
    pieces = _finished(*deltas, **options)
    message = folded(_streamed(pieces))
    assert _collected(pieces) == message
    return message


def _call(index: int, arguments: str, *, name: str | None = None, identity: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    call = {"index": index, "function": function} | ({} if identity is None else {"id": identity})
    return {"tool_calls": [call]}


def test_text() -> None:
    assert _both({"content": "北"}, {"content": "京 🌍"}) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "北京 🌍"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 30,
            "output_tokens": 7,
        },
    }


def test_a_stream_begins_with_the_tokens_of_its_prompt() -> None:
    start, *_ = events(_streamed(_finished({"content": "a"})))
    assert start["message"]["usage"]["input_tokens"] == 40


def test_events_of_a_text() -> None:
    kinds = [event["type"] for event in events(_streamed(_finished({"content": "a"}, {"content": "b"})))]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_thinking_comes_first_and_is_signed() -> None:
    message = _both({"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "42"})
    thought, text = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Let me see.")
    assert thought["signature"]
    assert text == {"type": "text", "text": "42"}


def test_thinking_that_is_not_wanted_is_not_shown() -> None:
    pieces = _finished({"reasoning_content": "secret"}, {"content": "42"})
    message = folded(_streamed(pieces, shows_thinking=False))
    assert _collected(pieces, shows_thinking=False) == message
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"] == ""


def test_tools() -> None:
    message = _both(
        {"content": "I look."},
        _call(0, "", name="f", identity="abc"),
        _call(0, '{"city":"Os'),
        _call(0, 'lo"}'),
        _call(1, "{}", name="g", identity="def"),
        reason="tool_calls",
    )
    assert message["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "abc", "name": "f", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "def", "name": "g", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


def test_calls_that_come_mixed_are_written_one_after_the_other() -> None:
    message = _both(
        _call(0, '{"a":', name="f", identity="x"),
        _call(1, '{"b":', name="g", identity="y"),
        _call(0, "1}"),
        _call(1, "2}"),
        reason="tool_calls",
    )
    assert [block["input"] for block in message["content"]] == [{"a": 1}, {"b": 2}]


def test_a_call_without_an_id_that_clients_take_gets_one() -> None:
    message = _both(_call(0, "{}", name="f"), _call(1, "{}", name="g", identity="a b"), reason="tool_calls")
    assert [block["id"] for block in message["content"]] == ["toolu_1_0", "toolu_1_1"]


def test_a_call_is_a_reason_to_stop_whatever_the_engine_says() -> None:
    assert _both(_call(0, "{}", name="f", identity="x"), reason="stop")["stop_reason"] == "tool_use"


def test_a_call_that_was_cut_off_is_never_whole() -> None:
    pieces = _finished({"content": "a"}, _call(0, '{"path":"/et', name="rm", identity="x"), reason="length")
    message = folded(_streamed(pieces))
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][1]["input"] == '{"path":"/et'
    collected = _collected(pieces)
    assert collected["stop_reason"] == "max_tokens"
    assert collected["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "nonsense"])
def test_a_call_that_cannot_be_made_is_an_error(arguments: str) -> None:
    pieces = _finished(_call(0, arguments, name="f", identity="x"), reason="tool_calls")
    for made in (_streamed, _collected):
        with pytest.raises(UpstreamFailed) as failure:
            made(pieces)
        assert "not a JSON object" in failure.value.message


@pytest.mark.parametrize(
    ("reason", "word", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", "<|im_end|>", ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_reasons_to_stop(reason: str, word: str | None, expected: tuple[str, str | None]) -> None:
    verbose = {} if word is None else {"__verbose": {"stopping_word": word, "prompt": "secret"}}
    message = _both({"content": "a"}, reason=reason, **verbose)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert b"secret" not in _streamed(_finished({"content": "a"}, reason=reason, **verbose))


def test_an_empty_answer_has_no_blocks() -> None:
    assert _both()["content"] == []


def test_a_call_that_goes_on_after_its_end_is_an_error() -> None:
    stream = MessageStream(input_tokens=1, stops=frozenset())
    stream.feed(chunk(_call(0, "{}", name="f", identity="x")) + chunk(_call(1, "{", name="g", identity="y")))
    with pytest.raises(UpstreamFailed):
        stream.feed(chunk(_call(0, "1")))


_DELTAS = st.one_of(
    st.builds(lambda text: {"content": text}, st.text(max_size=6)),
    st.builds(lambda text: {"reasoning_content": text}, st.text(max_size=6)),
)


@st.composite
def _answers(draw: st.DrawFn) -> list[bytes]:
    """Thoughts and texts in any order, then calls in parts."""
    deltas = draw(st.lists(_DELTAS, max_size=8))
    inputs = draw(st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3), max_size=3))
    for index, value in enumerate(inputs):
        arguments = orjson.dumps(value).decode()
        cut = draw(st.integers(0, len(arguments)))
        deltas.append(_call(index, arguments[:cut], name="f", identity=f"id{index}"))
        deltas.append(_call(index, arguments[cut:]))
    return _finished(*deltas, reason="tool_calls" if inputs else "stop")


@given(_answers(), st.lists(st.integers(0, 1 << 16), max_size=40))
def test_any_segmentation_gives_the_same_events_and_they_give_the_document(
    pieces: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(pieces)
    places = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    expected = _streamed(pieces)
    assert _streamed([whole[start:end] for start, end in pairwise(places)]) == expected
    assert _streamed([whole[place : place + 1] for place in range(len(whole))]) == expected
    assert folded(expected) == _collected(pieces)


def test_an_error_in_a_stream() -> None:
    error = EngineGone("The engine ended.", streamed=True)
    stream = MessageStream(input_tokens=1, stops=frozenset())
    begun = stream.feed(chunk({"content": "a"}))
    assert b"message_stop" not in begun
    (event,) = events(stream.failure(error))
    assert event == {"type": "error", "error": {"type": "api_error", "message": "The engine ended."}}


def _error_type(status: int) -> str:
    failure = type("Failure", (GatewayError,), {"status": status})
    return str(error_document(failure("x"))["error"]["type"])


def test_every_status_has_its_type() -> None:
    types = {status: _error_type(status) for status in (400, 401, 403, 404, 405, 413, 415, 429, 500, 502, 503, 504)}
    assert types == {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        415: "invalid_request_error",
        429: "rate_limit_error",
        500: "api_error",
        502: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }


@pytest.mark.parametrize(
    ("prompt", "answer", "at_least", "message"),
    [
        (5000, 100, False, "prompt is too long: 5000 tokens > 4096 maximum"),
        (5000, None, True, "prompt is too long: at least 5000 tokens > 4096 maximum"),
        (4000, 100, False, "input length and `max_tokens` exceed context limit: 4000 + 100 > 4096, decrease input"),
    ],
)
def test_an_overflow_says_it_in_the_words_that_clients_know(
    prompt: int, answer: int | None, at_least: bool, message: str
) -> None:
    error = ContextLengthExceeded(prompt_tokens=prompt, max_tokens=answer, context_tokens=4096, at_least=at_least)
    said = error_document(error)["error"]
    assert said["type"] == "invalid_request_error"
    assert said["message"].startswith(message)
    assert "prompt is too long" in said["message"]
