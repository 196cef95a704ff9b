"""Counting by fragments: the engine's own number, and only what is new is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.errors import RequestError
from app.tokens import FragmentCounts, Vocabulary, calibrate_fragments, read_vocabulary

CHAT_ML = Vocabulary(
    16, control=frozenset({"<|im_start|>", "<|im_end|>"}), specials=frozenset({"<|im_start|>", "<|im_end|>"})
)
Turns = Sequence[dict[str, Any]]


def chat_ml(messages: Turns) -> str:
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages)
    return turns + "<|im_start|>assistant\n"


class ToyEngine:
    """Cuts at special tokens, each one token, and makes a token of every three letters between them; adds BOS.

    ``merges`` takes the line feed after ``<|im_end|>`` into that token, as a token with rstrip does.
    """

    def __init__(self, *, merges: bool = False, render: Callable[[Turns], str] = chat_ml) -> None:
        self.asked: list[str] = []
        self._special = re.compile(r"(<\|im_start\|>|<\|im_end\|>\n?)" if merges else r"(<\|im_start\|>|<\|im_end\|>)")
        self._render = render

    async def render(self, body: bytes) -> str:
        return self._render(orjson.loads(body)["messages"])

    async def render_chat(self, messages: Turns) -> str:
        return self._render(messages)

    async def tokenize(self, text: str) -> int:
        self.asked.append(text)
        return self.tokens(text)

    async def count_chat(self, body: bytes) -> int:
        return self.tokens(await self.render(body)) + 1

    def tokens(self, text: str) -> int:
        return sum(
            1 if self._special.fullmatch(piece) else -(-len(piece) // 3) for piece in self._special.split(text) if piece
        )


def conversation(turns: int) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * turns
    return [{"role": role, "content": f"{role} {index} says it"} for index, role in enumerate(roles)][:-1]


async def _calibrated(engine: ToyEngine) -> FragmentCounts:
    counts = await calibrate_fragments(engine, CHAT_ML)
    assert counts is not None
    engine.asked.clear()
    return counts


async def test_a_growing_conversation_costs_its_new_turn() -> None:
    engine = ToyEngine()
    counts = await _calibrated(engine)
    for turns in range(1, 8):
        rendered = chat_ml(conversation(turns))
        before = sum(map(len, engine.asked))
        assert await counts.count(rendered) == engine.tokens(rendered) + 1
        new = sum(map(len, engine.asked)) - before
        assert new <= len(rendered) - len(chat_ml(conversation(turns - 1))) + 40
    rendered = chat_ml(conversation(7))
    engine.asked.clear()
    assert await counts.count(rendered) == engine.tokens(rendered) + 1
    assert engine.asked == []


async def test_any_other_text_is_counted_too() -> None:
    engine = ToyEngine()
    counts = await _calibrated(engine)
    for rendered in ("", "no mark at all", "<|im_end|>", "a<|im_end|>b<|im_end|>", "<|im_end|><|im_end|>c"):
        for _ in range(2):
            assert await counts.count(rendered) == engine.tokens(rendered) + 1


async def test_a_tail_is_not_a_beginning() -> None:
    engine = ToyEngine()
    counts = await _calibrated(engine)
    for rendered in ("ab<|im_end|>", "xyz<|im_end|>ab", "ab", "ab<|im_end|>ab"):
        assert await counts.count(rendered) == engine.tokens(rendered) + 1


async def test_what_does_not_add_up_is_not_used() -> None:
    assert await calibrate_fragments(ToyEngine(merges=True), CHAT_ML) is None


@pytest.mark.parametrize("refused", ["", "hello"])
async def test_a_template_that_refuses_a_probe_is_not_used(refused: str) -> None:
    def render(messages: Turns) -> str:
        if any(turn["content"] == refused for turn in messages):
            raise RequestError("Jinja Exception: no")
        return chat_ml(messages)

    assert await calibrate_fragments(ToyEngine(render=render), CHAT_ML) is None


async def test_a_template_without_marks_is_not_used() -> None:
    assert await calibrate_fragments(ToyEngine(render=lambda turns: turns[-1]["content"]), CHAT_ML) is None


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((), ("<|a|>",)),
        (("<|a|><|b|>",), ()),
        (("x<|",), ()),
        (("|>y",), ()),
        (("<|b|>", "a", "|"), ("<|a|>",)),
        (("<|c|>",), ("<|a|>",)),
    ],
)
def test_only_what_no_other_token_overlaps_is_a_mark(others: tuple[str, ...], expected: tuple[str, ...]) -> None:
    vocabulary = Vocabulary(9, control=frozenset({"<|a|>", "ab", "<|absent|>"}), specials=frozenset({"<|a|>", *others}))
    assert vocabulary.marks("<|a|>ab<|b|>") == expected


def test_the_vocabulary_of_a_real_model(demo_model: Path) -> None:
    vocabulary = read_vocabulary(demo_model)
    assert vocabulary is not None
    # A line feed and 80 spaces; as the file writes spaces it would be 162.
    assert 81 <= vocabulary.longest_token_bytes <= 82
    assert vocabulary.marks("<|im_start|>user\n<|im_end|>") == ("<|im_end|>", "<|im_start|>")
    assert "<|endoftext|>" in vocabulary.control
