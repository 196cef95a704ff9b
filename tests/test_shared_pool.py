"""Slots that share their cells: what is in flight never passes the pool, which would end every running request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from app.engine.command import shares_cells
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process

# Four slots of 70 share 280, rounded up to 512; each alone is rounded up to 256, so that only two fit.
_CONTEXT, _SLOTS, _POOL, _ALONE = 70, 4, 512, 256


def test_the_command_line_says_who_shares() -> None:
    assert shares_cells(["llama-server", "--kv-unified"])
    assert shares_cells(["llama-server", "-kvu"])
    assert not shares_cells(["llama-server", "--no-kv-unified"])


async def _embed(client: httpx.AsyncClient, number: int) -> httpx.Response:
    text = [1000 + (number * 97 + index * 31) % 9000 for index in range(_ALONE - 8)]
    return await client.post("/v1/embeddings", json={"model": MODEL_ID, "input": text})


async def _most_held(running: InProcess, work: asyncio.Task[list[httpx.Response]]) -> int:
    most = 0
    while not work.done():
        most = max(most, running.gateway.scheduler.held_tokens(MODEL_ID))
        await asyncio.wait({work}, timeout=0.01)
    return most


@pytest.mark.slow
async def test_texts_in_flight_never_pass_the_pool(demo_model: Path, tmp_path: Path) -> None:
    async with gateway_in_process(
        "embedded", demo_model, tmp_path, kind="embedding", context=_CONTEXT, parallel=_SLOTS
    ) as running:
        backend = running.backend
        assert (backend.pool_tokens, backend.slots, backend.counter.context_tokens) == (_POOL, _SLOTS, _ALONE)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}", timeout=100) as client:
            work = asyncio.ensure_future(asyncio.gather(*(_embed(client, number) for number in range(4))))
            most = await _most_held(running, work)
        assert [answer.status_code for answer in work.result()] == [200] * 4
        # Two at a time: they fit, and so does nothing else.
        assert 2 * (_ALONE - 8) == most <= _POOL
