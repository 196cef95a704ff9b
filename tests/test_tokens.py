"""Whether a prompt fits: the bound, the exact count, and when which of them decides."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest

from app.errors import ContextLengthExceeded, CountingTimedOut, RequestError, UpstreamFailed
from app.protocol import ChatRequest, parse_chat_request
from app.tokens import (
    TemplateBound,
    TokenCounter,
    VocabularyBound,
    calibrate_template,
    vocabulary_bound,
)

CONTEXT = 1000
Turns = Sequence[dict[str, str]]


def chat_ml(messages: Turns) -> str:
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages)
    return turns + "<|im_start|>assistant\n"


class FakeSource:
    """An engine that counts ``count`` tokens, renders by a function, and makes ``space_tokens`` of a space."""

    def __init__(self, *, count: int = 0, render: Callable[[Turns], str] = chat_ml, space_tokens: int = 1) -> None:
        self.count = count
        self.asked: list[Any] = []
        self._render = render
        self._space_tokens = space_tokens

    async def count_chat(self, body: bytes) -> int:
        self.asked.append(orjson.loads(body))
        return self.count

    async def render_chat(self, messages: Turns) -> str:
        return self._render(messages)

    async def tokenize(self, text: str) -> int:
        assert text == " "
        return self._space_tokens


def _request(*, content: str = "hi", **fields: Any) -> ChatRequest:
    return parse_chat_request(
        orjson.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields})
    )


def _counter(source: FakeSource, *, bounded: bool = False) -> TokenCounter:
    vocabulary = VocabularyBound(1, 2) if bounded else None
    template = TemplateBound(constant_bytes=10, message_bytes=20) if bounded else None
    return TokenCounter(source, context_tokens=CONTEXT, vocabulary=vocabulary, template=template)


async def _admit(
    prompt: int, max_tokens: int | None, *, default: int = 100, clamp: bool = False
) -> tuple[int, bool, bool] | tuple[int, int]:
    """What comes of it: (max_tokens, clamped, exact), or the two numbers of the refusal."""
    request = _request(max_tokens=max_tokens)
    try:
        admission = await _counter(FakeSource(count=prompt)).admit(request, default_max_tokens=default, clamp=clamp)
    except ContextLengthExceeded as refusal:
        return refusal.prompt_tokens, refusal.context_tokens
    assert (admission.prompt_tokens, admission.context_tokens) == (prompt, CONTEXT)
    assert admission.prompt_tokens + admission.max_tokens <= CONTEXT
    return admission.max_tokens, admission.clamped, admission.exact


L = CONTEXT
_TABLE = [
    # prompt, the client's limit, clamp → admitted with (limit, clamped, exact) or refused with both numbers
    (L - 1, 1, False, (1, False, True)),
    (L - 1, 2, False, (L - 1, L)),
    (L - 1, None, False, (1, False, True)),
    (L, 1, False, (L, L)),
    (L, None, False, (L, L)),
    (L, 1, True, (L, L)),
    (L + 1, None, True, (L + 1, L)),
    (3 * L, 1, False, (3 * L, L)),
    (900, 100, False, (100, False, True)),
    (900, 101, False, (900, L)),
    (900, 101, True, (100, True, True)),
    (900, 100, True, (100, False, True)),
    (901, None, False, (99, False, True)),
    (900, None, False, (100, False, True)),
    (10, None, True, (100, False, True)),
    (1, (1 << 31) - 1, False, (1, L)),
    (1, (1 << 31) - 1, True, (L - 1, True, True)),
]


@pytest.mark.parametrize(("prompt", "max_tokens", "clamp", "expected"), _TABLE)
async def test_what_is_admitted(prompt: int, max_tokens: int | None, clamp: bool, expected: tuple[int, ...]) -> None:
    assert await _admit(prompt, max_tokens, clamp=clamp) == expected


@pytest.mark.parametrize(("default", "expected"), [(5, (5, False, True)), (5000, (900, False, True))])
async def test_an_answer_without_a_limit_gets_one(default: int, expected: tuple[int, bool, bool]) -> None:
    assert await _admit(100, None, default=default) == expected


async def test_the_refusal_names_both_numbers() -> None:
    counter = _counter(FakeSource(count=900))
    with pytest.raises(ContextLengthExceeded) as refusal:
        await counter.admit(_request(max_tokens=200), default_max_tokens=1, clamp=False)
    assert refusal.value.message == (
        "This model's maximum context length is 1000 tokens. However, you requested 1100 tokens (900 in the messages, "
        "200 in the completion). Please reduce the length of the messages or completion."
    )


# The bound

# 10 + 20 for the one message, 2 for BOS and EOS, and the margin of 2 % + 64.
_OVERHEAD = 10 + 20 + 64 + 2


def _bound_of(content_bytes: int) -> int:
    return _OVERHEAD + content_bytes + (30 + content_bytes) // 50


@pytest.mark.parametrize("content", ["", "hi", "x" * 500, "北京🌍é"])
def test_the_bound(content: str) -> None:
    assert _counter(FakeSource(), bounded=True).bound(_request(content=content)) == _bound_of(len(content.encode()))


async def test_a_bound_that_settles_it_asks_nobody() -> None:
    source = FakeSource(count=5)
    bound = _bound_of(2)
    admission = await _counter(source, bounded=True).admit(
        _request(max_tokens=CONTEXT - bound), default_max_tokens=1, clamp=False
    )
    assert (admission.prompt_tokens, admission.exact, admission.max_tokens) == (bound, False, CONTEXT - bound)
    assert source.asked == []


async def test_a_bound_one_over_asks_for_the_exact_count() -> None:
    source = FakeSource(count=5)
    admission = await _counter(source, bounded=True).admit(
        _request(max_tokens=CONTEXT - _bound_of(2) + 1), default_max_tokens=1, clamp=False
    )
    assert (admission.prompt_tokens, admission.exact) == (5, True)
    assert source.asked == [{"messages": [{"role": "user", "content": "hi"}]}]


async def test_a_bound_never_refuses() -> None:
    source = FakeSource(count=CONTEXT - 1)
    admission = await _counter(source, bounded=True).admit(
        _request(content="x" * 50_000, max_tokens=1), default_max_tokens=1, clamp=False
    )
    assert admission.exact


@pytest.mark.parametrize(
    "fields", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {"reasoning_effort": "low"}]
)
async def test_what_is_not_plain_is_counted(fields: dict[str, Any]) -> None:
    source = FakeSource(count=5)
    counter = _counter(source, bounded=True)
    assert counter.bound(_request(**fields)) is None
    assert (await counter.admit(_request(**fields), default_max_tokens=1, clamp=False)).exact
    assert source.asked[0].keys() == {"messages"} | fields.keys()


async def test_what_the_engine_says_of_the_request_is_passed_on() -> None:
    class Refusing(FakeSource):
        async def count_chat(self, body: bytes) -> int:
            raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        await _counter(Refusing()).admit(_request(), default_max_tokens=1, clamp=False)


# Counting under load


class _Clock(asyncio.SelectorEventLoop):
    """A loop whose time can be put forward."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._ahead_seconds = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_seconds

    def put_forward(self, seconds: float) -> None:
        self._ahead_seconds += seconds


class BusySource(FakeSource):
    """Counts only when allowed to."""

    def __init__(self) -> None:
        super().__init__(count=5)
        self.allowed = asyncio.Event()
        self.entered = asyncio.Semaphore(0)
        self.inside = 0
        self.most_inside = 0

    async def count_chat(self, body: bytes) -> int:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.entered.release()
        try:
            await self.allowed.wait()
        finally:
            self.inside -= 1
        return self.count


async def _turn() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_counting_has_a_deadline_waiting_included() -> None:
    async def count_with_a_clock() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _Clock)
        source = BusySource()
        counter = _counter(source)
        tasks = [asyncio.create_task(counter.exact(_request())) for _ in range(3)]
        await source.entered.acquire()
        await source.entered.acquire()
        loop.put_forward(9)
        await _turn()
        assert not any(task.done() for task in tasks)
        loop.put_forward(1.5)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [CountingTimedOut] * 3
        assert {result.headers()["retry-after"] for result in results if isinstance(result, CountingTimedOut)} == {"5"}
        assert (source.inside, source.most_inside) == (0, 2)
        source.allowed.set()
        assert await counter.exact(_request()) == 5

    with asyncio.Runner(loop_factory=_Clock) as runner:
        runner.run(count_with_a_clock())


async def test_two_at_once_are_counted() -> None:
    source = BusySource()
    counter = _counter(source)
    tasks = [asyncio.create_task(counter.exact(_request())) for _ in range(6)]
    await source.entered.acquire()
    await source.entered.acquire()
    await _turn()
    assert source.inside == 2
    source.allowed.set()
    assert await asyncio.gather(*tasks) == [5] * 6
    assert source.most_inside == 2


async def test_who_leaves_makes_room() -> None:
    source = BusySource()
    counter = _counter(source)
    first, second, third = (asyncio.create_task(counter.exact(_request())) for _ in range(3))
    await source.entered.acquire()
    await source.entered.acquire()
    first.cancel()
    await source.entered.acquire()
    source.allowed.set()
    assert list(await asyncio.gather(second, third)) == [5, 5]
    assert first.cancelled()


# Vocabularies

_SPM, _BPE, _WPM, _UGM, _RWKV = 1, 2, 3, 4, 5


@pytest.mark.parametrize(
    ("kind", "pre_tokenizer", "space_tokens", "expected"),
    [
        (_SPM, "default", 1, VocabularyBound(1, 3)),
        (_SPM, "", 2, VocabularyBound(1, 3)),
        (_BPE, "smollm", 1, VocabularyBound(1, 2)),
        (_BPE, "gemma4", 3, VocabularyBound(3, 2)),
        (_BPE, "gemma4", 0, VocabularyBound(3, 2)),
        (_BPE, "mmbert", 1, None),
        (_BPE, "hybriddna", 1, None),
        (_BPE, "whitespace", 1, None),
        (_RWKV, "", 1, VocabularyBound(1, 0)),
        (_WPM, "", 1, None),
        (_UGM, "", 1, None),
        (0, "", 1, None),
        (6, "", 1, None),
    ],
)
async def test_vocabularies(kind: int, pre_tokenizer: str, space_tokens: int, expected: VocabularyBound | None) -> None:
    source = FakeSource(space_tokens=space_tokens)
    assert await vocabulary_bound(source, vocabulary_type=kind, pre_tokenizer=pre_tokenizer) == expected


# Templates


async def test_a_template_that_only_adds() -> None:
    bound = await calibrate_template(FakeSource())
    assert bound is not None
    for count in (1, 2, 7):
        messages = [{"role": "assistant", "content": "北京 x"}] * count
        content_bytes = sum(len(turn["content"].encode()) for turn in messages)
        rendered = len(chat_ml(messages).encode())
        assert rendered <= bound.rendered_bytes(messages=count, content_bytes=content_bytes) < 3 * rendered + 200


def _trims(messages: Turns) -> str:
    return chat_ml([turn | {"content": turn["content"].strip()} for turn in messages])


def _has_a_default_system(messages: Turns) -> str:
    default = [] if messages[0]["role"] == "system" else [{"role": "system", "content": "You are helpful." * 5}]
    return chat_ml([*default, *messages])


@pytest.mark.parametrize("render", [_trims, _has_a_default_system, chat_ml])
async def test_templates_that_may_be_bounded(render: Callable[[Turns], str]) -> None:
    bound = await calibrate_template(FakeSource(render=render))
    assert bound is not None
    assert bound.message_bytes >= 0


def _escapes(messages: Turns) -> str:
    return chat_ml([turn | {"content": turn["content"].replace("<", "&lt;")} for turn in messages])


def _doubles(messages: Turns) -> str:
    return chat_ml([turn | {"content": turn["content"] * 2} for turn in messages])


def _repeats_the_system(messages: Turns) -> str:
    head = messages[0]["content"] if messages[0]["role"] == "system" else ""
    return chat_ml([turn | {"content": head + turn["content"]} for turn in messages])


def _grows_with_its_turns(messages: Turns) -> str:
    return chat_ml(messages) + "#" * len(messages) ** 3


def _as_json(messages: Turns) -> str:
    return orjson.dumps(list(messages)).decode()


def _numbers_headings(messages: Turns) -> str:
    return chat_ml([turn | {"content": turn["content"].replace("# ", "# 1. ")} for turn in messages])


@pytest.mark.parametrize(
    "render", [_escapes, _doubles, _repeats_the_system, _grows_with_its_turns, _as_json, _numbers_headings]
)
async def test_templates_that_do_more_than_add_are_not_bounded(render: Callable[[Turns], str]) -> None:
    assert await calibrate_template(FakeSource(render=render)) is None


@pytest.mark.parametrize("refused", ["system", "empty"])
async def test_a_template_that_refuses_a_probe_is_not_bounded(refused: str) -> None:
    """Some templates raise for a system message or an empty one; such a model must still start."""

    def render(messages: Turns) -> str:
        if any(turn["role"] == refused or (refused == "empty" and not turn["content"]) for turn in messages):
            raise RequestError("The engine refused the request: Jinja Exception: not supported")
        return chat_ml(messages)

    assert await calibrate_template(FakeSource(render=render)) is None


async def test_an_engine_that_dies_is_not_a_template_that_refuses() -> None:
    def render(messages: Turns) -> str:
        raise UpstreamFailed("gone")

    with pytest.raises(UpstreamFailed):
        await calibrate_template(FakeSource(render=render))
