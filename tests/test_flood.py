"""On a real engine: a flood of one key beside a trickle of another, shares by weight, clients that wait as told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import pytest

from app.credential import new_key
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process
from tests.test_token_truth import logged, until_idle

_FLOOD = 200
_ANSWER_TOKENS = 16
_WEIGHTS = {"flood": 1, "trickle": 1, "heavy": 3, "light": 1}

pytestmark = [pytest.mark.any_engine, pytest.mark.timeout(300)]


class Client:
    """The holder of one key."""

    def __init__(self, running: InProcess, http: httpx.AsyncClient, secret: str) -> None:
        self._url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
        self._http, self._headers = http, {"authorization": f"Bearer {secret}"}

    async def ask(self, number: int = 0) -> httpx.Response:
        """An answer of always the same length."""
        messages = [{"role": "user", "content": f"Count from {number}."}]
        body = {"model": MODEL_ID, "messages": messages, "max_tokens": _ANSWER_TOKENS, "ignore_eos": True}
        return await self._http.post(self._url, json=body, headers=self._headers)

    async def all_of(self, requests: int) -> None:
        """So many at once, each served."""
        answers = await asyncio.gather(*map(self.ask, range(requests)))
        assert {answer.status_code for answer in answers} == {200}

    async def patient(self, number: int) -> bool | None:
        """Whether one who was told to wait, and came back exactly then, was served; None for one who need not wait."""
        answer = await self.ask(number)
        if answer.status_code == 200:
            return None
        assert answer.status_code in {429, 503}
        await asyncio.sleep(int(answer.headers["retry-after"]))
        return (await self.ask(number)).status_code == 200


@asynccontextmanager
async def clients(engine: str, model: Path, folder: Path, *, max_queue: int) -> AsyncIterator[dict[str, Client]]:
    """One for each key; what they did is in ``folder``/requests.jsonl afterwards."""
    secrets = {name: new_key() for name in _WEIGHTS}
    settings: dict[str, Any] = {
        "keys": [{"name": name, "hash": secrets[name][1], "weight": weight} for name, weight in _WEIGHTS.items()],
        "request_log": {"file": str(folder / "requests.jsonl")},
    }
    fields = {"context": 256, "parallel": 2, "max_queue": max_queue}
    limits = httpx.Limits(max_connections=None)
    async with (
        gateway_in_process(engine, model, folder, settings=settings, **fields) as running,
        httpx.AsyncClient(timeout=120, limits=limits) as http,
    ):
        holders = {name: Client(running, http, secrets[name][0]) for name in _WEIGHTS}
        # The engine is there, and it is known how fast it is.
        for number in range(5):
            await holders["flood"].ask(number)
        yield holders
        await until_idle(running)


@pytest.mark.long
async def test_a_trickle_beside_a_flood_waits_for_one_answer_at_most(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    async with clients(one_engine, demo_model, tmp_path, max_queue=1000) as holders:
        flood = asyncio.create_task(holders["flood"].all_of(_FLOOD))
        while not flood.done():
            assert (await holders["trickle"].ask()).status_code == 200
        await flood
    lines = [line for line in logged(tmp_path / "requests.jsonl").values() if line["key"] == "trickle"]
    service_ms = median(line["prefill_ms"] + line["decode_ms"] for line in lines)
    p95_ms = quantiles((line["queue_ms"] for line in lines), n=20)[-1]
    print(f"{len(lines)} requests waited {p95_ms:.0f} ms at p95, and took {service_ms:.0f} ms each")
    assert len(lines) >= _FLOOD / 4
    assert p95_ms <= 1.5 * service_ms


@pytest.mark.slow
async def test_shares_follow_the_weights(one_engine: str, demo_model: Path, tmp_path: Path) -> None:
    async with clients(one_engine, demo_model, tmp_path, max_queue=1000) as holders:
        await asyncio.gather(*(holders[name].all_of(80) for name in ("heavy", "light")))
    ended = sorted(logged(tmp_path / "requests.jsonl").values(), key=lambda line: float(line["at"]))
    served = [line for line in ended if line["key"] in {"heavy", "light"}]
    # From then on the light one has the engine for itself.
    last_heavy = max(index for index, line in enumerate(served) if line["key"] == "heavy")
    tokens: Counter[str] = Counter()
    for line in served[: last_heavy + 1]:
        tokens[line["key"]] += line["prompt_tokens"] + line["generated_tokens"]
    share = tokens["heavy"] / tokens.total()
    print(f"{share:.1%} of the tokens for three quarters of the weight")
    assert share == pytest.approx(0.75, rel=0.1)


@pytest.mark.long
async def test_who_comes_back_when_told_to_is_served(one_engine: str, demo_model: Path, tmp_path: Path) -> None:
    async with clients(one_engine, demo_model, tmp_path, max_queue=20) as holders:
        ends = [end for _ in range(2) for end in await asyncio.gather(*map(holders["flood"].patient, range(60)))]
    told = [served for served in ends if served is not None]
    print(f"{sum(told)} of {len(told)} were served when they came back")
    assert len(told) >= 60
    assert sum(told) >= 0.95 * len(told)
