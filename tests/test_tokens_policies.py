"""What becomes of a request that does not fit, and what the client is told."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.errors import ContextLengthExceeded, InvalidValue
from app.protocol import ChatRequest, parse_chat_request
from app.tokens import Admission, Overflow, TokenCounter, VocabularyBound, calibrate_fragments, droppable
from app.tokens.trimming import ranges
from tests.test_tokens_fragments import CHAT_ML, ToyEngine, chat_ml

CONTEXT = 200


def request(*messages: tuple[str, str], **fields: Any) -> ChatRequest:
    turns = [{"role": role, "content": content} for role, content in messages]
    return parse_chat_request(orjson.dumps({"model": "m", "messages": turns, **fields}))


async def gate(*, context: int = CONTEXT) -> tuple[TokenCounter, ToyEngine]:
    engine = ToyEngine()
    fragments = await calibrate_fragments(engine, CHAT_ML)
    engine.asked.clear()
    counter = TokenCounter(
        engine,
        context_tokens=context,
        vocabulary=VocabularyBound(1, 2),
        template=None,
        rendering=engine,
        longest_token_bytes=12,
        fragments=fragments,
    )
    return counter, engine


def true_count(asked: ChatRequest) -> int:
    return ToyEngine().tokens(chat_ml(asked.messages)) + 1


# By the size of the rendered prompt


async def test_few_rendered_bytes_settle_it() -> None:
    counter, engine = await gate()
    admission = await counter.admit(request(("user", "hi"), reasoning_effort="low"), default_max_tokens=10)
    assert (admission.exact, engine.asked) == (False, [])
    assert true_count(admission.request) <= admission.prompt_tokens <= 80


async def test_far_too_many_are_refused_without_counting() -> None:
    counter, engine = await gate()
    with pytest.raises(ContextLengthExceeded, match="at least") as refusal:
        await counter.admit(request(("user", "x" * 12 * CONTEXT)), default_max_tokens=10)
    assert engine.asked == []
    assert CONTEXT <= refusal.value.prompt_tokens <= true_count(request(("user", "x" * 12 * CONTEXT)))


async def test_what_lies_between_is_counted() -> None:
    counter, engine = await gate()
    asked = request(("user", "x" * 400))
    admission = await counter.admit(asked, default_max_tokens=10)
    assert (admission.prompt_tokens, admission.exact) == (true_count(asked), True)
    assert engine.asked
    assert await counter.count(asked) == await counter.exact(asked) == true_count(asked)


async def test_exact_counts_what_a_bound_would_settle() -> None:
    counter, _ = await gate()
    admission = await counter.admit(request(("user", "hi")), default_max_tokens=10, exact=True)
    assert (admission.exact, admission.prompt_tokens) == (True, true_count(request(("user", "hi"))))


# The ceiling


async def test_a_ceiling_refuses_or_shortens() -> None:
    counter, _ = await gate()
    asked = request(("user", "hi"), max_tokens=50)
    with pytest.raises(InvalidValue, match="not be over 20"):
        await counter.admit(asked, default_max_tokens=10, ceiling_tokens=20)
    shortened = await counter.admit(asked, default_max_tokens=10, ceiling_tokens=20, overflow=Overflow.CLAMP)
    assert (shortened.max_tokens, shortened.clamped) == (20, True)
    assert (b"x-context-clamped", b"20") in shortened.headers()
    default = await counter.admit(request(("user", "hi")), default_max_tokens=30, ceiling_tokens=20)
    assert (default.max_tokens, default.clamped) == (20, False)
    within = await counter.admit(request(("user", "hi"), max_tokens=20), default_max_tokens=10, ceiling_tokens=20)
    assert (within.max_tokens, within.clamped) == (20, False)


async def test_every_answer_counts() -> None:
    counter, _ = await gate()
    admission = await counter.admit(request(("user", "hi"), max_tokens=20, n=3), default_max_tokens=10, exact=True)
    assert admission.answer_tokens == 60
    assert admission.tokens == admission.prompt_tokens + 60


# The headers


async def test_a_warning_from_four_fifths_on() -> None:
    counter, _ = await gate()
    headers = {}
    for letters in (360, 450, 520):
        admission = await counter.admit(request(("user", "x" * letters)), default_max_tokens=1)
        headers[admission.prompt_tokens] = dict(admission.headers()).get(b"x-context-warning")
    for tokens, warning in headers.items():
        expected = b"the prompt uses %d%% of the context" % (100 * tokens // CONTEXT) if tokens >= 160 else None
        assert warning == expected
    assert None in headers.values()
    assert any(headers.values())


# Trimming

Q, A, S = ("user", "q" * 30), ("assistant", "a" * 30), ("system", "be brief")


def _calls(identity: str) -> dict[str, Any]:
    call = {"id": identity, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(identity: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": "r"}


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u", ()),
        ("su", ()),
        ("suau", ((1, 2),)),
        ("uauau", ((0, 1), (2, 3))),
        ("suCRRau", ((1, 2, 3, 4, 5),)),
        ("auau", ((0,), (1, 2))),
        ("uaCRuCRCRa", ((0, 1, 2, 3), (5, 6), (7, 8))),
        ("uCRCR", ((1, 2),)),
        ("usau", ((0, 2),)),
        ("a", ()),
        ("CRCR", ((0, 1),)),
    ],
)
def test_what_may_go(roles: str, expected: tuple[tuple[int, ...], ...]) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "s": {"role": "system", "content": ""},
        "u": {"role": "user", "content": ""},
        "a": {"role": "assistant", "content": ""},
        "C": _calls("c"),
        "R": _result("c"),
    }
    assert droppable([kinds[letter] for letter in roles]) == expected


def test_ranges() -> None:
    assert ranges([3, 1, 2, 7, 9, 10]) == "1-3,7,9-10"


async def _trim(asked: ChatRequest, *, context: int = CONTEXT) -> Admission:
    counter, _ = await gate(context=context)
    return await counter.admit(asked, default_max_tokens=20, overflow=Overflow.TRIM_OLDEST)


@pytest.mark.parametrize("turns", range(12))
async def test_as_little_as_possible_goes(turns: int) -> None:
    asked = request(S, *([Q, A] * turns), ("user", "last"), max_tokens=20)
    admission = await _trim(asked)
    assert admission.request.messages[0]["role"] == "system"
    assert admission.request.messages[-1]["content"] == "last"
    assert admission.dropped == tuple(range(1, 1 + len(admission.dropped)))
    if admission.dropped:
        assert admission.prompt_tokens == true_count(admission.request)
        with_one_more = request(S, *([Q, A] * (turns - len(admission.dropped) // 2 + 1)), ("user", "last"))
        assert true_count(with_one_more) + 20 > CONTEXT
        last = len(admission.dropped)
        assert (b"x-context-trimmed", b"messages 1-%d" % last) in admission.headers()
    assert admission.prompt_tokens + admission.max_tokens <= CONTEXT
    assert bool(admission.dropped) == (true_count(asked) + 20 > CONTEXT)


async def test_nothing_is_sent_without_system_or_question() -> None:
    with pytest.raises(ContextLengthExceeded):
        await _trim(request(("system", "s" * 900), Q, A, ("user", "last"), max_tokens=20))
    with pytest.raises(ContextLengthExceeded):
        await _trim(request(Q, A, ("user", "q" * 900)))


async def test_calls_go_with_their_results() -> None:
    body = {"model": "m", "messages": [S, Q]}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for step in range(20):
        messages += [_calls(f"c{step}"), _result(f"c{step}")]
    admission = await _trim(parse_chat_request(orjson.dumps(body | {"messages": messages})))
    kept = admission.request.messages
    assert admission.dropped
    assert [message["role"] for message in kept[:2]] == ["system", "user"]
    calls = [message["tool_calls"][0]["id"] for message in kept if message.get("tool_calls")]
    assert calls == [message["tool_call_id"] for message in kept if message["role"] == "tool"]
    assert calls[-1] == "c19"


async def test_without_opting_in_nothing_goes() -> None:
    counter, _ = await gate()
    asked = request(S, *([Q, A] * 12), ("user", "last"), max_tokens=20)
    for overflow in (Overflow.REJECT, Overflow.CLAMP):
        with pytest.raises(ContextLengthExceeded):
            await counter.admit(asked, default_max_tokens=20, overflow=overflow)
