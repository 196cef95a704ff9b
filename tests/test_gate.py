"""The gate against the real engine: its count is the engine's own, its bound is never below it, its edge is exact."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.protocol import ChatRequest, UsageMeter, parse_chat_request
from tests.checklist import lines, rows
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.gateway import GatewayProcess
from tests.inprocess import InProcess, gateway_in_process

_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "<think>", "<tool_call>", "<0x0A>"]
_WORDS = ["sky", "Donaudampfschiff", "naïve", "O'Neill", "x86_64", "…", "e\u0301", "\u00a0", "\u200b", "\ufeff"]


def _characters(low: int, high: int) -> Callable[[random.Random, int], str]:
    return lambda choose, size: "".join(chr(choose.randint(low, high)) for _ in range(size))


def _json(choose: random.Random, size: int) -> str:
    value = {f"k{index}": [choose.random(), None, '\n\t"\\'] for index in range(1 + size // 8)}
    return json.dumps(value, indent=choose.choice([None, 4]))


def _code(choose: random.Random, size: int) -> str:
    lines = ["def f(x):", "    return x ** 2  # ²", "\tif (a != b) {", "}};", "SELECT * FROM t WHERE a='b';", "", "  "]
    return "\n".join(choose.choice(lines) for _ in range(1 + size // 4))


KINDS: dict[str, Callable[[random.Random, int], str]] = {
    "ascii": _characters(0x20, 0x7E),
    "control": _characters(0x01, 0x1F),
    "cjk": _characters(0x4E00, 0x9FFF),
    "hangul": _characters(0xAC00, 0xD7A3),
    "emoji": _characters(0x1F300, 0x1FAFF),
    "bmp": _characters(0xA0, 0xD7FF),
    "astral": _characters(0x10000, 0x1FFFF),
    "spaces": lambda choose, size: choose.choice([" ", "\n", "\r\n", "\u3000"]) * size,
    "digits": _characters(0x30, 0x39),
    "words": lambda choose, size: " ".join(choose.choice(_WORDS) for _ in range(size)),
    "special": lambda choose, size: "".join(choose.choice([*_SPECIAL, " ", "a"]) for _ in range(size)),
    "json": _json,
    "code": _code,
}


def random_request(seed: int) -> ChatRequest:
    """A conversation of one to four messages, each of one kind of text."""
    choose = random.Random(seed)
    turns = choose.choice([["user"], ["user", "assistant", "user"]])
    roles = [*choose.choice([[], ["system"]]), *turns]
    messages = [
        {"role": role, "content": choose.choice(list(KINDS.values()))(choose, choose.choice([0, 1, 2, 5, 12]))}
        for role in roles
    ]
    body: dict[str, Any] = {"model": MODEL_ID, "messages": messages, "max_tokens": 1}
    return parse_chat_request(json.dumps(body).encode())


@pytest.fixture
async def served(engine: str, demo_model: Path, tmp_path: Path) -> AsyncIterator[InProcess]:
    async with gateway_in_process(engine, demo_model, tmp_path, context=4096) as running:
        yield running


async def used_prompt_tokens(served: InProcess, request: ChatRequest) -> int:
    """What the engine says after it has answered."""
    meter = UsageMeter(keep_usage=False)
    async with served.backend.open(request.engine_body(max_tokens=1)) as reply:
        while chunk := await reply.read():
            meter.feed(chunk)
    assert meter.usage is not None
    return meter.usage.prompt_tokens


@lines(90, 91)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prompts", [30, pytest.param(300, marks=pytest.mark.slow)])
async def test_count_is_exact_and_bound_is_a_bound(served: InProcess, prompts: int) -> None:
    counter = served.backend.counter
    bounded = 0
    for seed in range(prompts):
        request = random_request(seed)
        used = await used_prompt_tokens(served, request)
        assert await counter.exact(request) == used, f"seed {seed}"
        bound = counter.bound(request)
        assert bound is not None, f"seed {seed}"
        assert bound >= used, f"seed {seed}"
        bounded += 1
    assert bounded == prompts


CALL = {"name": "weather", "arguments": '{"at":"Bern"}'}


@rows(18, 41)
@lines(92)
async def test_tools_and_history_are_counted(served: InProcess) -> None:
    body = {
        "model": MODEL_ID,
        "messages": [
            {"role": "system", "content": "Use the tools."},
            {"role": "user", "content": [{"type": "text", "text": "Weather in"}, {"type": "text", "text": " Bern?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    }
    request = parse_chat_request(orjson.dumps(body))
    assert served.backend.counter.bound(request) is None
    assert await served.backend.counter.exact(request) == await used_prompt_tokens(served, request)


def prompt_of(gateway: GatewayProcess, tokens: int) -> list[dict[str, str]]:
    """Messages that are exactly so many prompt tokens, by the gateway's own answer."""
    words = tokens

    def count() -> int:
        answer = ask(gateway, [{"role": "user", "content": " a" * words}], max_tokens=CONTEXT_TOKENS)
        return int(answer.json()["error"]["n_prompt_tokens"])

    words -= count() - tokens
    assert count() == tokens
    return [{"role": "user", "content": " a" * words}]


def ask(gateway: GatewayProcess, messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
    body = {"model": MODEL_ID, "messages": messages, "ignore_eos": True} | fields
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)


@rows(55)
@lines(84, 86, 87)
@pytest.mark.slow
def test_the_edge_of_the_context(gateway: GatewayProcess) -> None:
    full, almost = prompt_of(gateway, CONTEXT_TOKENS), prompt_of(gateway, CONTEXT_TOKENS - 1)
    refused = ask(gateway, full, max_tokens=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    one_left = ask(gateway, almost, max_tokens=1)
    assert one_left.status_code == 200
    assert one_left.json()["usage"]["total_tokens"] == CONTEXT_TOKENS
    assert ask(gateway, almost, max_tokens=2).status_code == 400
    # Without a limit of the client's the answer gets what is left.
    assert ask(gateway, almost).json()["usage"]["completion_tokens"] == 1


@rows(55)
@lines(88)
def test_the_default_limit_ends_an_answer_that_would_not_end(gateway: GatewayProcess) -> None:
    answer = ask(gateway, [{"role": "user", "content": "Go on."}]).json()
    assert answer["usage"]["completion_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_headers_say_what_is_left(gateway: GatewayProcess) -> None:
    bound = ask(gateway, [{"role": "user", "content": "Hi."}], max_tokens=1)
    assert bound.headers["x-context-limit"] == str(CONTEXT_TOKENS)
    assert bound.headers["x-context-count"] == "bound"
    assert int(bound.headers["x-context-prompt-tokens"]) >= bound.json()["usage"]["prompt_tokens"]
    exact = ask(gateway, prompt_of(gateway, 600), max_tokens=1)
    assert exact.headers["x-context-count"] == "exact"
    assert int(exact.headers["x-context-prompt-tokens"]) == exact.json()["usage"]["prompt_tokens"] == 600
    assert exact.headers["x-context-remaining"] == str(CONTEXT_TOKENS - 600)


@lines(85)
def test_an_overflow_is_answered_while_every_slot_is_busy(gateway: GatewayProcess) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    body = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url, json=body) as first,
        client.stream("POST", url, json=body) as second,
    ):
        next(first.iter_raw())
        next(second.iter_raw())
        refused = ask(gateway, [{"role": "user", "content": "word " * 3 * CONTEXT_TOKENS}], stream=True)
        assert refused.status_code == 400
        assert refused.elapsed.total_seconds() < 1


@pytest.mark.slow
async def test_clamp_shortens_the_answer_and_says_so(engine: str, demo_model: Path, tmp_path: Path) -> None:
    fields = {"context": 256, "on_overflow": "clamp"}
    async with gateway_in_process(engine, demo_model, tmp_path, **fields) as served, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{served.port}/v1/chat/completions"
        body = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True}
        clamped = await client.post(url, json=body | {"max_tokens": 5000}, timeout=60)
        assert clamped.status_code == 200
        used = clamped.json()["usage"]
        assert used["total_tokens"] == 256
        assert clamped.headers["x-context-clamped"] == str(used["completion_tokens"])
        unclamped = await client.post(url, json=body | {"max_tokens": 5}, timeout=60)
        assert "x-context-clamped" not in unclamped.headers
