"""llama-server's extras behind the gateway: tokens, texts, templates and exact counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from app.credential import new_key
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, running_gateway

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> 🌍"}]


def post(gateway: GatewayProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": MODEL_ID, **body}, timeout=60)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_there_and_back(prefix: str, gateway: GatewayProcess) -> None:
    tokens = post(gateway, f"{prefix}/tokenize", content="naïve 🌍 <|im_end|>").json()
    assert set(tokens) == {"tokens"}
    text = post(gateway, f"{prefix}/detokenize", tokens=tokens["tokens"])
    assert text.json() == {"content": "naïve 🌍 <|im_end|>"}
    assert post(gateway, f"{prefix}/detokenize", tokens=[]).json() == {"content": ""}


def test_switches_of_the_tokenizer(gateway: GatewayProcess) -> None:
    (special,) = post(gateway, "/tokenize", content="<|im_end|>").json()["tokens"]
    assert len(post(gateway, "/tokenize", content="<|im_end|>", parse_special=False).json()["tokens"]) > 1
    assert post(gateway, "/tokenize", content="<|im_end|>", with_pieces=True).json()["tokens"][0]["id"] == special


def test_template_count_and_usage_agree(gateway: GatewayProcess) -> None:
    prompt = post(gateway, "/apply-template", messages=MESSAGES).json()["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    counted = post(gateway, "/v1/chat/completions/input_tokens", messages=MESSAGES).json()
    assert counted["object"] == "response.input_tokens"
    assert len(post(gateway, "/tokenize", content=prompt, add_special=True).json()["tokens"]) == counted["input_tokens"]
    answer = post(gateway, "/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == counted["input_tokens"]


def test_a_single_model_needs_no_name(gateway: GatewayProcess) -> None:
    answer = httpx.post(f"{gateway.url}/tokenize", json={"content": "hi"}, timeout=60)
    assert len(answer.json()["tokens"]) == 1


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/tokenize", "content", None),
        ("/tokenize", "content", ["a"]),
        ("/tokenize", "content", "a" * ((1 << 20) + 1)),
        ("/tokenize", "add_special", 1),
        ("/detokenize", "tokens", None),
        ("/detokenize", "tokens", [49152]),
        ("/detokenize", "tokens", [-4]),
        ("/detokenize", "tokens", ["a"]),
        ("/apply-template", "messages", []),
        ("/v1/chat/completions/input_tokens", "messages", [{"role": "wizard", "content": "a"}]),
    ],
)
def test_what_the_engine_would_fail_on_is_refused(
    path: str, field: str, value: object, gateway: GatewayProcess
) -> None:
    answer = post(gateway, path, **{"content": "a", "messages": MESSAGES, "tokens": [1], field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


@pytest.mark.slow
def test_keys_open_only_their_models(one_engine: str, demo_model: Path, tmp_path: Path) -> None:
    key, digest = new_key()
    config = {
        "engine": {"binary": one_engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {name: {"path": str(demo_model), "context": 256} for name in ("a", "b")},
        "keys": [{"name": "alice", "hash": digest, "models": ["b"]}],
    }
    with running_gateway(config, tmp_path) as gateway:
        for path, body in (
            ("/tokenize", {"content": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/apply-template", {"messages": MESSAGES}),
            ("/v1/chat/completions/input_tokens", {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["a"]}),
        ):
            url, headers = f"{gateway.url}{path}", {"authorization": f"Bearer {key}"}
            assert httpx.post(url, json={"model": "b", **body}, timeout=60).status_code == 401
            assert httpx.post(url, json={"model": "a", **body}, headers=headers, timeout=60).status_code == 403
            # Two models: which one must be said.
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 400
