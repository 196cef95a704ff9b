"""The engine's chat stream, read: any segmentation says the same, and tool calls are told apart however they come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UpstreamFailed
from app.protocol import Delta, DeltaReader, UsageMeter
from tests.chat_stream import DONE, chunk, recorded, usage_chunk


def _read(pieces: Sequence[bytes]) -> list[Delta]:
    """Through the meter, as in an exchange: it hands on whole events."""
    meter, reader = UsageMeter(keep_usage=False), DeltaReader()
    return [delta for piece in pieces for delta in reader.read(meter.feed(piece))]


def _calls(deltas: Sequence[dict[str, Any]]) -> dict[int, list[str]]:
    """Place → id, name and arguments of every call."""
    found: dict[int, list[str]] = {}
    for delta in _read(list(recorded(*({"tool_calls": [call]} for call in deltas)))):
        for call in delta.calls:
            whole = found.setdefault(call.place, ["", "", ""])
            whole[0], whole[1] = whole[0] or call.id, whole[1] or call.name
            whole[2] += call.arguments
    return found


def test_text_reasoning_and_the_end() -> None:
    stream = [
        *recorded({"reasoning_content": "hm"}, {"content": "北京"}, {"content": "🌍"}),
        chunk({}, "stop", __verbose={"stop_type": "word", "stopping_word": "END"}),
        usage_chunk(prompt=3, completion=2),
        DONE,
    ]
    assert _read(stream) == [
        Delta("", "", (), None, None),
        Delta("hm", "", (), None, None),
        Delta("", "北京", (), None, None),
        Delta("", "🌍", (), None, None),
        Delta("", "", (), "stop", "END"),
    ]


def test_the_word_that_ended_an_answer_as_vllm_says_it() -> None:
    event = b'data: {"choices":[{"delta":{},"finish_reason":"stop","stop_reason":%b}]}\n\n'
    assert [delta.stopping_word for delta in DeltaReader().read(event % b'"END"')] == ["END"]
    # The id of a token that ends every answer.
    assert [delta.stopping_word for delta in DeltaReader().read(event % b"2")] == [None]


def test_id_and_model_are_those_of_the_engine() -> None:
    reader = DeltaReader()
    reader.read(chunk({"content": "a"}))
    assert (reader.id, reader.model) == ("chatcmpl-1", "m")


@given(st.lists(st.text(max_size=8), max_size=6), st.lists(st.integers(0, 3000), max_size=30))
def test_any_segmentation_says_the_same(words: list[str], cuts: list[int]) -> None:
    events = [
        *recorded(*({"content": word} for word in words), {"tool_calls": [_call(0, "a", "f", '{"x":"\\u5317"}')]}),
        chunk({}, "tool_calls"),
        usage_chunk(prompt=3, completion=2),
        DONE,
    ]
    whole = b"".join(events)
    places = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    pieces = [whole[start:end] for start, end in pairwise(places)]
    assert _read(pieces) == _read(events)


def _call(index: int | None, identity: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    call: dict[str, Any] = {"function": {"arguments": arguments} | ({} if name is None else {"name": name})}
    return call | ({} if index is None else {"index": index}) | ({} if identity is None else {"id": identity})


# Report 14: how engines stream two calls, one of them with arguments cut inside an escape.
_TWO_CALLS = {
    "the id first only": [
        _call(0, "a", "f", ""),
        _call(0, None, None, '{"x":"\\u53'),
        _call(0, None, None, '17"}'),
        _call(1, "b", "g", "{}"),
    ],
    "the id on every delta": [_call(0, "a", "f", '{"x":"\\u53'), _call(0, "a", "f", '17"}'), _call(1, "b", "g", "{}")],
    "no index": [_call(None, "a", "f", '{"x":"\\u53'), _call(None, None, None, '17"}'), _call(None, "b", "g", "{}")],
    "no index, the id on every delta": [
        _call(None, "a", "f", '{"x":"\\u53'),
        _call(None, "a", "f", '17"}'),
        _call(None, "b", "g", "{}"),
    ],
    "interleaved": [_call(0, "a", "f", '{"x":"\\u53'), _call(1, "b", "g", "{}"), _call(0, None, None, '17"}')],
    "the first index is 1": [_call(1, "a", "f", '{"x":"\\u53'), _call(1, None, None, '17"}'), _call(2, "b", "g", "{}")],
    "one index for all": [_call(0, "a", "f", '{"x":"\\u53'), _call(0, None, None, '17"}'), _call(0, "b", "g", "{}")],
}


@pytest.mark.parametrize("deltas", _TWO_CALLS.values(), ids=_TWO_CALLS)
def test_report_14_calls_are_told_apart(deltas: list[dict[str, Any]]) -> None:
    assert _calls(deltas) == {0: ["a", "f", '{"x":"\\u5317"}'], 1: ["b", "g", "{}"]}


@pytest.mark.parametrize(
    "event",
    [
        b"data: nonsense\n\n",
        b"data: [1]\n\n",
        b'data: {"choices":[1]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[1]}}]}\n\n',
        b'data: {"choices":{"a":1}}\n\n',
    ],
)
def test_what_is_no_chunk_fails(event: bytes) -> None:
    with pytest.raises(UpstreamFailed) as failure:
        DeltaReader().read(event)
    assert failure.value.headers()["x-should-retry"] == "false"


def test_comments_and_other_lines_are_passed_over() -> None:
    event = b": ping\n\nevent: message\ndata: " + orjson.dumps({"choices": [{"delta": {"content": "a"}}]}) + b"\n\n"
    assert [delta.text for delta in DeltaReader().read(event)] == ["a"]
