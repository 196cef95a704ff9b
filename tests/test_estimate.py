"""Estimates of prompts for servers that cannot count, by themselves; against a real engine: test_remote.py."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from app.errors import ModelFileError
from app.tokens import BY_LETTERS, PromptEstimate, by_vocabulary
from tests.gguf_writer import write
from tests.shapes import dense


async def estimate(**body: object) -> int:
    return await PromptEstimate(BY_LETTERS).count_chat(orjson.dumps(body))


async def test_everything_that_is_rendered_counts() -> None:
    user = {"role": "user", "content": "What is the weather like in Paris today?"}
    plain = await estimate(messages=[user])
    assert await estimate(messages=[user, user]) >= plain + 10
    assert await estimate(messages=[user], tools=[{"type": "function", "function": {"name": "weather"}}]) >= plain + 10
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}
    assert await estimate(messages=[user, call]) >= plain + 15
    parts = {"role": "user", "content": [{"type": "text", "text": user["content"]}]}
    assert await estimate(messages=[parts]) == plain


async def test_a_picture_is_not_counted_by_its_letters() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    assert 1600 <= await estimate(messages=[{"role": "user", "content": [picture]}]) < 2500


async def test_a_long_prompt_is_estimated_beside_the_loop() -> None:
    assert await estimate(messages=[{"role": "user", "content": "word " * 20_000}]) >= 20_000


async def test_a_prompt_that_was_underestimated_raises_later_ones() -> None:
    """A server may put a system prompt of its own in front."""
    estimate = PromptEstimate(BY_LETTERS)
    short, long = (orjson.dumps({"messages": [{"role": "user", "content": "hi " * n}]}) for n in (1, 500))
    before = await estimate.count_chat(short), await estimate.count_chat(long)
    await estimate.learn(long, before[1] - 100)
    assert await estimate.count_chat(long) == before[1]
    await estimate.learn(short, before[0] + 450)
    await estimate.learn(short, before[0] + 450)
    assert await estimate.count_chat(short) == before[0] + 450
    assert await estimate.count_chat(long) == before[1] + 450


async def test_a_prompt_without_a_template_has_its_margin_too() -> None:
    text = "one two three " * 100
    bare = await PromptEstimate(BY_LETTERS).tokenize(text)
    assert bare >= 1.15 * BY_LETTERS.tokens(text)
    assert await PromptEstimate(BY_LETTERS).tokenize(text, special=True) == bare + 3


def test_a_file_without_a_vocabulary_of_bytes(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", dense(layers=1, embedding=64, heads=1, kv_heads=1, vocabulary=64))
    with pytest.raises(ModelFileError, match="leave out 'tokenizer'"):
        by_vocabulary(file)
