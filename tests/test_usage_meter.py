"""The meter: what of an engine's stream goes to the client, and what is learned from it."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol import EventTooLong, SSESplitter, Timings, Usage, UsageMeter, event_data
from tests.checklist import lines, rows

# GATEWAY_TEST_CUTS=10000 takes three minutes.
_CUTS = int(os.environ.get("GATEWAY_TEST_CUTS", "150"))
_quick = hypothesis.settings(max_examples=_CUTS, deadline=None, derandomize=True, database=None)
_PLACES = st.lists(st.integers(0, 1_000_000), max_size=12)
_HEAD: dict[str, Any] = {
    "created": 1790000000,
    "id": "chatcmpl-Qm1zX0",
    "model": "smollm2",
    "system_fingerprint": "b11669-0f1e2d3c",
    "object": "chat.completion.chunk",
}
_TIMINGS = {"cache_n": 3, "prompt_n": 28, "prompt_ms": 125.0, "predicted_n": 5, "predicted_ms": 200.0}
DONE = b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def chunk(delta: dict[str, Any], *, index: int = 0, finish: str | None = None) -> bytes:
    """A chunk as llama-server sends it: no ``"usage":null``, ``finish_reason`` null until the last."""
    choice = {"finish_reason": finish, "index": index, "delta": delta}
    return _event({"choices": [choice], **_HEAD})


def usage_chunk(*, prompt: int = 31, completion: int = 5, cached: int = 3, timings: bool = True) -> bytes:
    usage = {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return _event({"choices": [], **_HEAD, "usage": usage, **({"timings": _TIMINGS} if timings else {})})


def answer(*texts: str, index: int = 0) -> list[bytes]:
    """Role chunk, one chunk per text, finish chunk."""
    return [
        chunk({"role": "assistant", "content": None}, index=index),
        *(chunk({"content": text}, index=index) for text in texts),
        chunk({}, index=index, finish="stop"),
    ]


# Texts that look like what the meter looks for; in JSON their quotes are escaped.
DECOYS = (
    '"usage":{"completion_tokens":9}',
    "[DONE]",
    "data: [DONE]\n\n",
    '"error":{"message":"x"}',
    '"finish_reason":"',
)
STREAM = [*answer("Hello", " 北京🌍é", *DECOYS, "\n\n", " end"), usage_chunk(), DONE]
ERROR = _event({"error": {"code": 500, "message": "Compute error.", "type": "server_error"}})


def progress(processed: int, *, total: int = 900, cache: int = 0) -> bytes:
    """What the engine sends for each batch of the prompt when asked to."""
    part = {"total": total, "cache": cache, "processed": processed, "time_ms": 5}
    choice = {"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}
    return _event({"choices": [choice], **_HEAD, "prompt_progress": part})


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


def _feed(meter: UsageMeter, data: bytes, places: list[int]) -> bytes:
    return b"".join(meter.feed(part) for part in _cut(data, places))


@rows(32)
@given(_PLACES)
@_quick
def test_with_usage_the_bytes_are_the_engines(places: list[int]) -> None:
    meter = UsageMeter(keep_usage=True)
    assert _feed(meter, b"".join(STREAM), places) == b"".join(STREAM)
    assert meter.complete


@given(_PLACES)
@_quick
def test_without_usage_only_that_chunk_is_missing(places: list[int]) -> None:
    meter = UsageMeter(keep_usage=False)
    assert _feed(meter, b"".join(STREAM), places) == b"".join([*STREAM[:-2], DONE])
    assert meter.complete


@given(_PLACES)
@_quick
def test_what_is_learned_does_not_depend_on_the_cut(places: list[int]) -> None:
    meter = UsageMeter(keep_usage=False)
    _feed(meter, b"".join(STREAM), places)
    assert meter.usage == Usage(prompt_tokens=31, completion_tokens=5, cached_tokens=3)
    assert meter.timings == Timings(prompt_tokens_per_second=224.0, generation_tokens_per_second=20.0)
    assert (meter.finished, meter.done, meter.error) == (1, True, None)
    assert meter.events == len(STREAM) - 2


@given(_PLACES)
@_quick
def test_progress_is_ours(places: list[int]) -> None:
    meter = UsageMeter(keep_usage=True)
    whole = b"".join([progress(0), progress(512), progress(900), *STREAM])
    assert _feed(meter, whole, places) == b"".join(STREAM)
    assert meter.events == len(STREAM) - 2
    assert meter.complete


def test_single_bytes() -> None:
    meter = UsageMeter(keep_usage=True)
    assert b"".join(meter.feed(bytes([byte])) for byte in b"".join(STREAM)) == b"".join(STREAM)


@given(_PLACES)
@_quick
def test_a_half_line_is_never_forwarded(places: list[int]) -> None:
    meter = UsageMeter(keep_usage=True)
    for part in _cut(b"".join(STREAM), places):
        sent = meter.feed(part)
        assert sent == b"" or sent.endswith(b"\n\n")


def test_an_event_without_its_end_stays_here() -> None:
    meter = UsageMeter(keep_usage=True)
    assert meter.feed(STREAM[0] + STREAM[1][:-1]) == STREAM[0]


@pytest.mark.parametrize("text", DECOYS)
def test_text_that_looks_like_the_protocol_passes_untouched(text: str) -> None:
    meter = UsageMeter(keep_usage=False)
    call = {"index": 0, "function": {"arguments": orjson.dumps({"text": text}).decode()}}
    for event in (chunk({"content": text}), chunk({"tool_calls": [call]}), chunk({"reasoning_content": text})):
        assert meter.feed(event) == event
    assert (meter.usage, meter.error, meter.done, meter.finished) == (None, None, False, 0)


# n > 1


def _two_choices() -> list[bytes]:
    """As the engine interleaves two choices: one usage chunk after each, the first amid the other's deltas."""
    first, second = answer("a", "b", index=0), answer("c", "d", "e", index=1)
    return [
        *(first[0], second[0], *first[1:], usage_chunk(completion=3, timings=False)),
        *(*second[1:], usage_chunk(completion=4, cached=31), DONE),
    ]


@given(_PLACES)
@_quick
def test_several_choices_get_one_usage_chunk_before_the_end(places: list[int]) -> None:
    stream = _two_choices()
    meter = UsageMeter(keep_usage=True, choices=2)
    sent = _feed(meter, b"".join(stream), places)
    events = SSESplitter().feed(sent)
    assert events[:-2] == [event for event in stream if b'"usage":' not in event][:-1]
    assert events[-1] == DONE
    merged = orjson.loads(event_data(events[-2]))
    assert merged["choices"] == []
    assert merged["id"] == _HEAD["id"]
    assert merged["usage"] == {
        "prompt_tokens": 31,
        "completion_tokens": 7,
        "total_tokens": 38,
        "prompt_tokens_details": {"cached_tokens": 31},
    }
    assert meter.complete


def test_several_choices_without_usage() -> None:
    stream = _two_choices()
    meter = UsageMeter(keep_usage=False, choices=2)
    assert meter.feed(b"".join(stream)) == b"".join(event for event in stream if b'"usage":' not in event)
    assert meter.usage == Usage(prompt_tokens=31, completion_tokens=7, cached_tokens=31)


def test_one_of_two_choices_is_not_complete() -> None:
    meter = UsageMeter(keep_usage=False, choices=2)
    meter.feed(b"".join([*answer("a"), usage_chunk()]))
    assert meter.feed(DONE) == b""
    assert not meter.complete
    assert meter.error is not None


# Ends that are none


@lines(100)
def test_an_error_ends_what_is_forwarded() -> None:
    meter = UsageMeter(keep_usage=True)
    assert meter.feed(STREAM[0] + ERROR + STREAM[1] + DONE) == STREAM[0]
    assert meter.error == {"code": 500, "message": "Compute error.", "type": "server_error"}
    assert not meter.complete


@given(_PLACES)
@_quick
def test_after_an_error_nothing_is_forwarded_however_it_is_cut(places: list[int]) -> None:
    meter = UsageMeter(keep_usage=True)
    whole = b"".join([*STREAM[:2], ERROR, *STREAM[2:]])
    assert _feed(meter, whole, places) == b"".join(STREAM[:2])
    assert not meter.complete


def test_after_the_end_nothing_is_forwarded() -> None:
    meter = UsageMeter(keep_usage=True)
    meter.feed(b"".join(STREAM))
    events = meter.events
    assert meter.feed(STREAM[1]) == b""
    assert meter.events == events


@pytest.mark.parametrize("error", ["overloaded", {"message": "x"}])
def test_an_error_of_any_shape(error: object) -> None:
    meter = UsageMeter(keep_usage=True)
    meter.feed(_event({"error": error}))
    assert meter.error == (error if isinstance(error, dict) else {"message": "overloaded"})


@lines(102)
@pytest.mark.parametrize("length", range(len(STREAM)))
def test_a_stream_that_breaks_off_is_not_complete(length: int) -> None:
    meter = UsageMeter(keep_usage=True)
    meter.feed(b"".join(STREAM[:length]))
    assert not meter.complete


def test_the_end_without_a_finish_is_an_error() -> None:
    meter = UsageMeter(keep_usage=True)
    assert meter.feed(b"".join([*STREAM[:3], DONE])) == b"".join(STREAM[:3])
    assert meter.error is not None
    assert not meter.complete


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"usage":{"completion_tokens":\n\n',
        b'data: {"error":\n\n',
        b'data: {"choices":5,"usage":{}}\n\n',
        b'data: {"choices":[5],"finish_reason":"stop"}\n\n',
        b'data: {"choices":[],"usage":7}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":"many"}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens_details":[1]}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1},"timings":[1]}\n\n',
    ],
)
def test_an_engine_that_sends_nonsense_is_an_error_of_the_engine(event: bytes) -> None:
    meter = UsageMeter(keep_usage=True)
    assert meter.feed(event) == b""
    assert meter.error is not None


def test_an_event_without_end_is_refused() -> None:
    meter = UsageMeter(keep_usage=True)
    meter.feed(b"x" * (3 << 20))
    with pytest.raises(EventTooLong):
        meter.feed(b"x" * (2 << 20))


# Numbers


def test_generated_tokens_are_the_engines_count_once_known() -> None:
    meter = UsageMeter(keep_usage=False)
    for event in STREAM[:3]:
        meter.feed(event)
    assert meter.generated_tokens == 2
    meter.feed(b"".join(STREAM[3:]))
    assert meter.generated_tokens == 5


def test_nothing_is_generated_before_the_first_token() -> None:
    meter = UsageMeter(keep_usage=False, choices=2)
    assert meter.generated_tokens == 0
    meter.feed(chunk({"role": "assistant", "content": None}))
    assert meter.generated_tokens == 0


def test_a_ping_is_no_token() -> None:
    meter = UsageMeter(keep_usage=False)
    assert meter.feed(b":\n\n") == b":\n\n"
    meter.feed(STREAM[0] + b":\n\n" + STREAM[1])
    assert meter.generated_tokens == 1


def test_usage_document_and_missing_numbers() -> None:
    assert Usage.read({}) == Usage()
    assert Usage.read({"prompt_tokens": None, "prompt_tokens_details": None}) == Usage()
    assert Usage.read(Usage(5, 6, 2).document()) == Usage(5, 6, 2)


@pytest.mark.parametrize("timings", [{}, {"prompt_ms": 0, "prompt_n": 5, "predicted_ms": 10, "predicted_n": 1}])
def test_no_speed_where_nothing_was_measured(timings: dict[str, float]) -> None:
    assert Timings.read(timings) == Timings(None, None)


def test_who_left_is_charged_what_the_engine_held() -> None:
    meter = UsageMeter(keep_usage=False)
    meter.feed(progress(31, total=31, cache=3))
    for part in answer("one", "two")[:-1]:
        meter.feed(part)
    assert meter.generated_tokens == 2
    # Prompt and four tokens, and the fifth, which was not yet read back in.
    meter.left(35, prompt_tokens=40)
    assert (meter.prompt_tokens, meter.cached_tokens, meter.generated_tokens) == (31, 3, 5)


def test_who_left_in_the_prompt_pays_for_what_was_read() -> None:
    meter = UsageMeter(keep_usage=False)
    meter.feed(progress(128, total=500))
    meter.left(256, prompt_tokens=500)
    assert (meter.prompt_tokens, meter.generated_tokens) == (256, 0)


def test_another_requests_last_word_is_not_believed() -> None:
    meter = UsageMeter(keep_usage=False)
    meter.feed(progress(31, total=31))
    meter.feed(b"".join(answer("one", "two", "three")[:-1]))
    meter.left(20, prompt_tokens=31)
    assert (meter.prompt_tokens, meter.generated_tokens) == (31, 3)


def test_who_left_before_a_word_is_charged_the_sum() -> None:
    meter = UsageMeter(keep_usage=False)
    meter.left(32, prompt_tokens=31)
    assert (meter.prompt_tokens, meter.generated_tokens) == (31, 2)
    bound = UsageMeter(keep_usage=False)
    bound.left(32, prompt_tokens=90)
    assert bound.prompt_tokens + bound.generated_tokens == 33
