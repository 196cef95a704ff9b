"""Embeddings on a real engine: any input up to the context, exact usage, refusals that say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway import GatewayProcess, running_gateway

# More than the engine's own batch of 512, which would be a 500.
CONTEXT_TOKENS = 768
MODEL_ID = "vectors"


@pytest.fixture(scope="session")
def vectors(engine: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose only model makes embeddings."""
    model = {"path": str(demo_model), "kind": "embedding", "context": CONTEXT_TOKENS, "parallel": 2}
    config = {"engine": {"binary": engine}, "memory": {"ram_reserve": "256MiB"}, "models": {MODEL_ID: model}}
    with running_gateway(config, tmp_path_factory.mktemp("vectors")) as running:
        yield running


def post(gateway: GatewayProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": MODEL_ID, **body}, timeout=60)


def test_models_show_the_kind(vectors: GatewayProcess) -> None:
    (model,) = httpx.get(f"{vectors.url}/v1/models").json()["data"]
    assert model["kind"] == "embedding"
    assert model["capabilities"] == ["embedding"]


def test_83_chat_with_an_embedding_model_is_refused(vectors: GatewayProcess) -> None:
    answer = post(vectors, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi."}])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_endpoint_for_model"
    assert "/v1/embeddings" in answer.json()["error"]["message"]
