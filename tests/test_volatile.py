"""Times at the head of a system prompt: what is rounded, what is left alone, and what the cache gains by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.protocol import parse_chat_request, with_rounded_times
from tests.conftest import MODEL_ID
from tests.inprocess import gateway_in_process


def rounded(*messages: dict[str, Any]) -> tuple[list[dict[str, Any]], list[tuple[bytes, bytes]]]:
    request, note = with_rounded_times(parse_chat_request(orjson.dumps({"model": "m", "messages": messages})))
    return request.messages, note


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Now: 2026-11-30T18:22:48.123Z.", "Now: 2026-11-30T18:00:00.000Z."),
        ("2026-11-30 18:22", "2026-11-30 18:00"),
        ("Mon Nov 30 18:22:48 2026", "Mon Nov 30 18:00:00 2026"),
        ("Fri Jan  2 09:05:59 UTC", "Fri Jan  2 09:00:00 UTC"),
    ],
)
def test_a_moment_goes_back_to_its_hour(before: str, after: str) -> None:
    messages, note = rounded(
        {"role": "system", "content": f"Hello.\r\n{before}\nEnd."}, {"role": "user", "content": before}
    )
    assert messages[0]["content"] == f"Hello.\r\n{after}\nEnd."
    assert messages[1]["content"] == before
    assert note == [(b"x-prompt-rounded", b"times in the system prompt, line 2")]


@pytest.mark.parametrize(
    "content",
    [
        "We open at 18:22 daily.",
        "Released on 2026-11-30.",
        "Version 2026-11-30 18:22:48:7",
        "2026-11-30 25:61:00",
        "Proverbs 18:22, Mon Nov 30",
        "\n" * 5 + "2026-11-30 18:22:48",
        "",
    ],
)
def test_everything_else_is_left_alone(content: str) -> None:
    assert rounded({"role": "system", "content": content}) == ([{"role": "system", "content": content}], [])


def test_only_a_system_prompt_of_plain_text() -> None:
    for message in (
        {"role": "user", "content": "2026-11-30 18:22:48"},
        {"role": "system", "content": [{"type": "text", "text": "2026-11-30 18:22:48"}]},
    ):
        assert rounded(message) == ([message], [])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [True, False])
async def test_the_cache_holds_when_times_are_rounded(
    one_engine: str, demo_model: Path, tmp_path: Path, rounds: bool
) -> None:
    answers = []
    async with (
        gateway_in_process(one_engine, demo_model, tmp_path, context=512, round_prompt_times=rounds) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}", timeout=100) as client,
    ):
        for second in (11, 48):
            system = f"2026-11-30 18:2{second % 7}:{second}\n" + "The sky is blue. " * 20
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello."}]
            body = {"model": MODEL_ID, "messages": messages, "max_tokens": 1}
            counted = (await client.post("/v1/chat/completions/input_tokens", json=body)).json()["input_tokens"]
            answers.append(await client.post("/v1/chat/completions", json=body))
            assert answers[-1].json()["usage"]["prompt_tokens"] == counted
    usage = answers[1].json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
    print(f"rounded: {rounds}, cached: {cached:.0%} of {usage['prompt_tokens']}")
    assert ("x-prompt-rounded" in answers[1].headers) is rounds
    assert cached > 0.9 if rounds else cached < 0.5
