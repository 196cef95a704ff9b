"""Questions for numbers: paid for by the engine's count, ended with their client, answered over an engine's death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.credential import new_key
from tests.conftest import MODEL_ID
from tests.gguf_writer import U32
from tests.inprocess import InProcess, gateway_in_process
from tests.random_model import write_random
from tests.shapes import dense, uniform

pytestmark = pytest.mark.any_engine

CONTEXT_TOKENS = 512
BUDGET_TOKENS = 100_000
# One token for each letter, some seconds of work even for a tiny model.
LONG = ["ab" * (CONTEXT_TOKENS // 2)] * 120


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers that says of itself that it makes embeddings."""
    sizes: dict[str, Any] = {"layers": 2, "embedding": 64, "heads": 4, "kv_heads": 2, "head_length": 16}
    keys = {"pooling_type": U32(1)}
    shape = dense(
        architecture="qwen3", feed_forward=128, vocabulary=512, context=1024, kind=uniform("F32"), keys=keys, **sizes
    )
    return write_random(tmp_path_factory.mktemp("tiny") / "tiny.gguf", shape)


class Asking:
    """A client with a key that has a budget."""

    def __init__(self, served: InProcess, client: httpx.AsyncClient) -> None:
        self.served = served
        self._client = client

    async def embed(self, inputs: list[str]) -> httpx.Response:
        return await self._client.post("/v1/embeddings", json={"model": MODEL_ID, "input": inputs}, timeout=120)

    async def used_tokens(self) -> int:
        answer = await self._client.get("/v1/usage")
        return int(answer.json()["usage"]["tokens_per_day"]["used"])

    async def in_flight(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.served.gateway.scheduler.in_flight(MODEL_ID) != count:
                await asyncio.sleep(0.01)


@pytest.fixture
async def asking(one_engine: str, tiny: Path, tmp_path: Path) -> AsyncIterator[Asking]:
    key, digest = new_key()
    settings = {"keys": [{"name": "alice", "hash": digest, "tokens_per_day": BUDGET_TOKENS}]}
    fields: dict[str, Any] = {"settings": settings, "context": CONTEXT_TOKENS, "parallel": 2}
    async with (
        gateway_in_process(one_engine, tiny, tmp_path, **fields) as served,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{served.port}", headers={"authorization": f"Bearer {key}"}
        ) as client,
    ):
        yield Asking(served, client)


async def test_the_key_pays_what_the_engine_counted(asking: Asking) -> None:
    answers = [await asking.embed(texts) for texts in (["abc"], ["ab", "c" * 100], ["🌍"])]
    total = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
    assert total == 3 + 2 + 100 + 4
    assert await asking.used_tokens() == total
    refused = await asking.embed(["a" * CONTEXT_TOKENS] * 1000)
    assert refused.status_code == 429
    too_long = await asking.embed(["a" * (CONTEXT_TOKENS + 1)])
    assert too_long.status_code == 400
    assert await asking.used_tokens() == total


async def test_who_leaves_takes_the_rest_of_the_work_along(asking: Asking) -> None:
    request = asyncio.create_task(asking.embed(LONG))
    # As many slots as there are.
    await asking.in_flight(2)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await asking.in_flight(0)
    assert await asking.used_tokens() < sum(map(len, LONG))
    assert (await asking.embed(["abc"])).status_code == 200


@pytest.mark.slow
async def test_an_engine_that_dies_is_followed_by_another_that_goes_on(asking: Asking) -> None:
    request = asyncio.create_task(asking.embed(LONG))
    await asking.in_flight(2)
    os.kill(asking.served.backend.process.pid, signal.SIGKILL)
    answer = await request
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == len(LONG)
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, LONG))


async def test_nothing_begins_while_the_gateway_stops(asking: Asking) -> None:
    await asking.served.gateway.proxy.drain(0)
    client = asking._client
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": "a"},
        "/v1/rerank": {"query": "a", "documents": ["a"]},
        "/v1/completions": {"prompt": "a"},
        "/tokenize": {"content": "a"},
        "/detokenize": {"tokens": [1]},
        "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "a"}]},
        "/infill": {"input_prefix": "a"},
    }
    for path, body in bodies.items():
        answer = await client.post(path, json={"model": MODEL_ID, **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_stopping"), path


async def test_the_plan_of_an_embedding_model_holds(asking: Asking) -> None:
    """What a whole context in one batch takes was counted before it was loaded."""
    backend = asking.served.backend
    assert backend.plan.placement.batch == CONTEXT_TOKENS
    compute = sum(
        buffer.size_bytes for buffer in backend.measured.buffers if buffer.kind.value in ("compute", "output")
    )
    assert 0 < compute <= 1.01 * backend.plan.memory.host.compute_bytes
