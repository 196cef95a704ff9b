"""The splitter: whole events, wherever the network cut them."""

from __future__ import annotations

import os
import time

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol import EventTooLong, SSESplitter, event_data
from tests.checklist import lines

# GATEWAY_TEST_CUTS=10000 takes three minutes.
_CUTS = int(os.environ.get("GATEWAY_TEST_CUTS", "150"))
_quick = hypothesis.settings(max_examples=_CUTS, deadline=None, derandomize=True, database=None)

_LINE = st.sampled_from(
    [
        *("data: {}", "data:no space", "data:  two spaces", "data", "data:", "event: error", "id: 1", "retry: 5"),
        *(": ping", ":", "data: 北京🌍é", "data: [DONE]", 'data: {"a":"\\r\\n\\n\\u00e9"}', "unknown: x", "data: a:b"),
    ]
)
_EVENT = st.lists(_LINE, min_size=1, max_size=4)
_STREAM = st.lists(_EVENT, max_size=6)


def _events(stream: list[list[str]], ending: str) -> list[bytes]:
    return [(ending.join(lines) + ending * 2).encode() for lines in stream]


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    """``data`` in parts that end at these places; some may be empty."""
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(_STREAM, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 10_000), max_size=12))
@_quick
def test_any_cut_gives_the_same_events(stream: list[list[str]], ending: str, places: list[int]) -> None:
    whole = _events(stream, ending)
    splitter = SSESplitter()
    assert [event for part in _cut(b"".join(whole), places) for event in splitter.feed(part)] == whole
    assert splitter.pending == b""


@lines(98)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_single_bytes_give_the_same_events(ending: str) -> None:
    whole = _events([["data: 北京🌍é", "data: second"], [": ping"], ["event: error", "data: {}"]], ending)
    splitter = SSESplitter()
    fed = [splitter.feed(bytes([byte])) for byte in b"".join(whole)]
    assert [event for events in fed for event in events] == whole


@given(_STREAM, st.binary(max_size=30).filter(lambda rest: b"\n" not in rest and b"\r" not in rest))
@_quick
def test_what_has_not_ended_waits(stream: list[list[str]], rest: bytes) -> None:
    whole = _events(stream, "\n")
    splitter = SSESplitter()
    assert splitter.feed(b"".join(whole) + rest) == whole
    assert splitter.pending == rest


@given(st.lists(st.binary(max_size=40), max_size=20))
@_quick
def test_nothing_is_lost_or_invented(parts: list[bytes]) -> None:
    splitter = SSESplitter()
    events = [event for part in parts for event in splitter.feed(part)]
    assert b"".join(events) + splitter.pending == b"".join(parts)


def test_line_endings_may_differ_from_event_to_event() -> None:
    splitter = SSESplitter()
    assert splitter.feed(b"data: 1\r\n\r\ndata: 2\n\ndata: 3\r\n\r\n") == [
        *(b"data: 1\r\n\r\n", b"data: 2\n\n", b"data: 3\r\n\r\n"),
    ]


def test_what_waits_is_bounded() -> None:
    splitter = SSESplitter(max_bytes=100)
    splitter.feed(b"x" * 100)
    with pytest.raises(EventTooLong, match="longer than 100 bytes"):
        splitter.feed(b"x")


def test_whole_events_may_exceed_the_bound_together() -> None:
    splitter = SSESplitter(max_bytes=20)
    assert len(splitter.feed(b"data: 12345\n\n" * 100)) == 100


def test_a_long_event_in_small_parts_is_not_scanned_again_and_again() -> None:
    splitter = SSESplitter()
    part = b"x" * 1024
    started = time.process_time()
    for _ in range(1500):
        splitter.feed(part)
    assert len(splitter.feed(b"\n\n")[0]) == 1500 * 1024 + 2
    # To scan all that waits once more for each part takes seconds, and nobody else is served meanwhile.
    assert time.process_time() - started < 0.8


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"data:  x\n\n", b" x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\r\ndata:\r\ndata: b\r\n\r\n", b"a\n\nb"),
        (b"event: error\nid: 1\ndata: x\n\n", b"x"),
        (b": ping\n\n", b""),
        (b":\n\n", b""),
        (b"datax: y\n\n", b""),
        ("data: 北京\u2028\u0085x\n\n".encode(), "北京\u2028\u0085x".encode()),
    ],
)
def test_event_data(event: bytes, data: bytes) -> None:
    assert event_data(event) == data
