"""Many prompts at the edge of the context, and many requests of two users that must not hear of each other.

``GATEWAY_TEST_EDGES=1000`` is the whole measure; CI runs a small part of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.credential import new_key
from tests.checklist import rows
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, running_gateway

_EDGES = int(os.environ.get("GATEWAY_TEST_EDGES", "40"))
_CONTEXT = 256
_WORDS = ("river", "北京", "🌍", "{'a': 1}", "def f(x):", "<|im_end|>", "naïve", "zzzzqqq", "\n\n", "0123456789", "<s>")
_KEYS = {name: new_key() for name in ("alice", "bob")}

pytestmark = [pytest.mark.slow, pytest.mark.any_engine]


@pytest.fixture(scope="module")
def served(engine: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    entry = {"path": str(demo_model), "context": _CONTEXT, "parallel": 2}
    keys = [{"name": name, "hash": hashed} for name, (_, hashed) in _KEYS.items()]
    config = {
        "engine": {"binary": engine},
        "models": {MODEL_ID: entry},
        "keys": keys,
        "memory": {"ram_reserve": "256MiB"},
    }
    with running_gateway(config, tmp_path_factory.mktemp("edges")) as running:
        yield running


def _client(served: GatewayProcess, name: str) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=600, headers={"authorization": f"Bearer {_KEYS[name][0]}"})


def _chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": content}], "ignore_eos": True} | fields


@pytest.mark.timeout(1800)
def test_prompts_around_the_limit(served: GatewayProcess) -> None:
    """prompt + max_tokens = context passes and is used to the last token; one more is refused; nothing is a 500."""

    def one(seed: int) -> str:
        random_ = random.Random(seed)
        content = " ".join(random_.choice(_WORDS) for _ in range(random_.randint(20, 70)))
        with _client(served, "alice") as client:
            counted = client.post("/v1/responses/input_tokens", json={"model": MODEL_ID, "input": content})
            prompt = counted.json()["input_tokens"]
            left = _CONTEXT - prompt
            over = client.post("/v1/chat/completions", json=_chat(content, max_tokens=max(1, left + 1)))
            assert over.status_code == 400, over.text
            assert over.json()["error"]["code"] == "context_length_exceeded"
            assert over.json()["error"]["n_prompt_tokens"] == prompt
            if left < 1:
                return "refused"
            answer = client.post("/v1/chat/completions", json=_chat(content, max_tokens=left))
        assert answer.status_code == 200, answer.text
        usage, [choice] = answer.json()["usage"], answer.json()["choices"]
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == _CONTEXT or choice["finish_reason"] == "stop"
        return str(choice["finish_reason"])

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(one, range(_EDGES)))
    assert outcomes.count("length") > _EDGES // 2
    assert outcomes.count("refused") > 0


@rows(40)
@pytest.mark.timeout(1800)
def test_two_users_never_hear_of_each_other(served: GatewayProcess) -> None:
    """Row 40: every word of one is unknown to the other's answers, with the cache of prompts at work."""
    canaries = {"alice": ("Zanthorq", "Mivulex"), "bob": ("Quibbendorf", "Trazzlewick")}

    def one(number: int) -> None:
        name = ("alice", "bob")[number % 2]
        mine, theirs = canaries[name], canaries["bob" if name == "alice" else "alice"]
        content = f"My secret words are {mine[0]} and {mine[1]}. Repeat the secret words. {number % 7}"
        with _client(served, name) as client:
            path = ("/v1/chat/completions", "/v1/completions")[number % 3 == 0]
            fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
            body = _chat(content, **fields) if "chat" in path else {"model": MODEL_ID, "prompt": content, **fields}
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert not any(word.lower()[:5] in answer.text.lower() for word in theirs)
            for closed in ("/slots", "/props", "/v1/slots", "/slots/0?action=save"):
                assert client.get(closed).status_code == 404

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(2 * _EDGES)))
