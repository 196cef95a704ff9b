"""The budgets through the whole gateway: counted as the engine counts, charged as it was used, refused in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.credential import new_key
from app.protocol import parse_chat_request
from tests.checklist import lines
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process
from tests.test_gate import CALL, random_request, used_prompt_tokens

HELLO = [{"role": "user", "content": "Hello."}]


def _key(name: str, **limits: Any) -> tuple[str, dict[str, Any]]:
    secret, digest = new_key()
    return secret, {"name": name, "hash": digest} | limits


class Asker:
    """A client with a key."""

    def __init__(self, served: InProcess, secret: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{served.port}", headers={"authorization": f"Bearer {secret}"}, timeout=100
        )

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL_ID, "messages": HELLO, "max_tokens": 8, "ignore_eos": True} | fields
        return await self._client.post("/v1/chat/completions", json=body, headers=headers)

    async def usage(self) -> dict[str, Any]:
        answer = await self._client.get("/v1/usage")
        return dict(answer.json()["usage"])


@pytest.fixture
async def served(engine: str, demo_model: Path, tmp_path: Path) -> AsyncIterator[InProcess]:
    async with gateway_in_process(engine, demo_model, tmp_path, context=2048, parallel=2) as running:
        yield running


@pytest.mark.slow
async def test_fragments_count_as_the_engine_does(served: InProcess) -> None:
    """Conversations that grow, with tools and without: after every turn the number is the engine's own."""
    counter, new = served.backend.counter, 0
    assert counter._fragments is not None
    for seed in range(40):
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages = [*messages, *random_request(seed * 10 + turn).messages]
            fields: dict[str, Any] = {"model": MODEL_ID, "messages": messages}
            if seed % 4 == 0:
                fields["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
            request = parse_chat_request(orjson.dumps(fields))
            assert await counter.count(request) == await counter.exact(request), f"seed {seed}, turn {turn}"
            new += 1
        if seed % 10 == 0:
            assert await counter.count(request) == await used_prompt_tokens(served, request)
    assert new == 120


async def test_history_with_calls_is_counted_by_fragments(served: InProcess) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    request = parse_chat_request(orjson.dumps({"model": MODEL_ID, "messages": messages}))
    assert await served.backend.counter.count(request) == await used_prompt_tokens(served, request)


@pytest.mark.slow
async def test_a_key_is_charged_what_the_engine_says(engine: str, demo_model: Path, tmp_path: Path) -> None:
    secret, key = _key("alice", tokens_per_day=10_000, requests_per_minute=100)
    async with (
        gateway_in_process(engine, demo_model, tmp_path, settings={"keys": [key]}, context=512, parallel=2) as served,
        Asker(served, secret) as alice,
    ):
        answers = await asyncio.gather(*(alice.ask(n=1 + index % 2) for index in range(6)))
        assert [answer.status_code for answer in answers] == [200] * 6
        total = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
        assert (await alice.usage())["tokens_per_day"]["used"] == total
        assert answers[0].headers["x-ratelimit-limit-tokens"] == "10000"
        assert int(answers[0].headers["x-ratelimit-remaining-requests"]) >= 94
        # A refusal by the gate costs nothing, not even a request.
        refused = await alice.ask(max_tokens=5000)
        assert refused.status_code == 400
        assert (await alice.usage())["requests_per_day"]["used"] == 6
    # It is kept.
    async with (
        gateway_in_process(engine, demo_model, tmp_path, settings={"keys": [key]}, context=512) as served,
        Asker(served, secret) as alice,
    ):
        assert (await alice.usage())["tokens_per_day"]["used"] == total


async def test_who_leaves_pays_for_what_was_generated(engine: str, demo_model: Path, tmp_path: Path) -> None:
    secret, key = _key("alice", tokens_per_day=10_000)
    async with (
        gateway_in_process(engine, demo_model, tmp_path, settings={"keys": [key]}, context=4096) as served,
        Asker(served, secret) as alice,
    ):
        body = {"model": MODEL_ID, "messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        seen = 0
        async with alice._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert (await alice.usage())["tokens_per_day"]["used"] > 3000
            async for line in answer.aiter_lines():
                seen += '"content":"' in line
                if seen == 10:
                    break
        async with asyncio.timeout(10):
            while (used := (await alice.usage())["tokens_per_day"]["used"]) > 3000:
                await asyncio.sleep(0.02)
        prompt = await served.backend.counter.exact(parse_chat_request(orjson.dumps(body)))
        # Nobody reads to the last byte that was sent; the engine is ahead by a few tokens.
        assert prompt + 10 <= used <= prompt + 300


@lines(50)
@pytest.mark.slow
async def test_a_spent_budget_is_not_passed(engine: str, demo_model: Path, tmp_path: Path) -> None:
    secret, key = _key("alice", tokens_per_day=200)
    async with (
        gateway_in_process(engine, demo_model, tmp_path, settings={"keys": [key]}, context=512, parallel=2) as served,
        Asker(served, secret) as alice,
    ):
        answers = await asyncio.gather(*(alice.ask(max_tokens=4) for _ in range(100)))
        spent = sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200)
        assert 0 < spent <= 200
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert refused.headers["x-should-retry"] == "false"
        assert (await alice.usage())["tokens_per_day"]["used"] == spent


@lines(49)
@pytest.mark.slow
async def test_a_minute_is_waited_for_and_concurrency_is_kept(engine: str, demo_model: Path, tmp_path: Path) -> None:
    secret, key = _key("alice", requests_per_minute=2)
    other_secret, other = _key("bob", concurrent=1)
    async with (
        gateway_in_process(
            engine, demo_model, tmp_path, settings={"keys": [key, other]}, context=512, parallel=2
        ) as served,
        Asker(served, secret) as alice,
        Asker(served, other_secret) as bob,
    ):
        codes = [(await alice.ask()).status_code for _ in range(2)]
        refused = await alice.ask()
        assert (*codes, refused.status_code) == (200, 200, 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "x-should-retry" not in refused.headers
        answers = await asyncio.gather(*(bob.ask(max_tokens=30) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
        assert (await bob.ask()).status_code == 200


@pytest.mark.slow
async def test_trimming_is_asked_for_and_announced(served: InProcess) -> None:
    secret = "ZEBRA-7"
    turns = [{"role": "system", "content": f"The code is {secret}."}]
    for index in range(40):
        turns += [{"role": "user", "content": f"word {index} " * 40}, {"role": "assistant", "content": "Yes."}]
    turns.append({"role": "user", "content": "What is the code?"})
    async with Asker(served, "none") as client:
        assert (await client.ask(messages=turns)).status_code == 400
        trimmed = await client.ask(messages=turns, headers={"x-context-overflow": "trim_oldest"})
        assert trimmed.status_code == 200
        assert trimmed.headers["x-context-trimmed"].startswith("messages 1-")
        assert trimmed.json()["usage"]["prompt_tokens"] == int(trimmed.headers["x-context-prompt-tokens"])
        assert (await client.ask(headers={"x-context-overflow": "forget"})).status_code == 400
        assert (await client.ask(headers={"x-priority": "batch"})).status_code == 200


@pytest.mark.slow
async def test_two_agents_keep_their_slots(served: InProcess) -> None:
    """Two conversations in turn on two slots: from the second turn on nearly all of the prompt is in the cache."""
    ours = await _cached_part(served, "ours")
    # The engine's own choice, by how alike the prompts are.
    served.backend.chooses_slots = True
    engines = await _cached_part(served, "the engine's")
    print(f"cached from the second turn on: {ours:.1%}, as the engine chooses: {engines:.1%}")
    assert ours >= 0.9


async def _cached_part(served: InProcess, name: str) -> float:
    choose, messages = random.Random(name), dict[str, list[dict[str, str]]]()
    for agent in ("a", "b"):
        words = " ".join(choose.choice(["sky", "river", "stone", "cloud", "road"]) for _ in range(300))
        messages[agent] = [{"role": "system", "content": f"Agent {agent}, {name}. {words}"}]
    prompt = cached = 0
    async with Asker(served, "none") as client:
        for turn in range(5):
            for agent, turns in messages.items():
                turns.append({"role": "user", "content": f"Step {turn} of {agent}."})
                answer = (await client.ask(messages=turns, seed=1, temperature=0)).json()
                turns.append(answer["choices"][0]["message"] | {"role": "assistant"})
                if turn:
                    prompt += answer["usage"]["prompt_tokens"]
                    cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached / prompt


_SECRET, _FILLER = "The code is ZEBRA-7.", "word " * 3000
_SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": _SECRET}, {"role": "user", "content": _FILLER}]
    },
    "/v1/completions": {"prompt": _SECRET + _FILLER},
    "/v1/responses": {"instructions": _SECRET, "input": _FILLER},
    "/v1/messages": {"system": _SECRET, "messages": [{"role": "user", "content": _FILLER}], "max_tokens": 8},
}


@pytest.mark.slow
async def test_a_secret_at_the_head_is_never_cut_off(served: InProcess) -> None:
    """Row 1 of the reports: what is too long is refused on every surface, streamed or not, and nothing is generated."""
    async with Asker(served, "none") as client:
        for path, body in _SURFACES.items():
            for stream in (False, True):
                answer = await client._client.post(path, json={"model": MODEL_ID, "stream": stream} | body)
                assert answer.status_code == 400, (path, answer.text)
                assert "2048" in answer.json()["error"]["message"], path
    assert served.gateway.scheduler.in_flight(MODEL_ID) == 0
