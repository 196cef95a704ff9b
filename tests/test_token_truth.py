"""The counters equal what the engine did: answers, streams, clients that leave, refusals, and an engine's death."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checklist import rows
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process

pytestmark = pytest.mark.any_engine

_CLIENTS = 4
_WORDS = ("red", "green", "blue", "a longer prompt of quite a few words", "what is the capital of France?")


class Ledger:
    """What the clients know: usage by request for answers that came whole, events seen of those they left."""

    def __init__(self) -> None:
        self.usage: dict[str, dict[str, Any]] = {}
        self.seen: dict[str, int] = {}
        self.refused: set[str] = set()

    def expect(self, request_id: str, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            self.usage[request_id] = answer.json()["usage"]
        else:
            self.refused.add(request_id)


class Crowd:
    """Clients that mix everything; the dice are the same in every run."""

    def __init__(self, running: InProcess, requests: int) -> None:
        self.ledger = Ledger()
        self._url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
        self._dice = random.Random(7)
        self._numbers = iter(range(requests))

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:
            for _ in range(_CLIENTS):
                group.create_task(self._visit(client))

    async def _visit(self, client: httpx.AsyncClient) -> None:
        for number in self._numbers:
            request_id, dice = f"r{number}", self._dice.random()
            body = {
                "model": MODEL_ID,
                "messages": [{"role": "user", "content": self._dice.choice(_WORDS)}],
                "max_tokens": self._dice.choice([1, 2, 5]),
            }
            if dice < 0.4:
                self.ledger.expect(request_id, await self._post(client, request_id, body))
            elif dice < 0.7:
                await self._stream(
                    client, request_id, body | {"stream": True, "stream_options": {"include_usage": True}}
                )
            elif dice < 0.9:
                await self._leave(client, request_id, body | {"stream": True, "max_tokens": 60, "ignore_eos": True})
            else:
                self.ledger.expect(request_id, await self._post(client, request_id, body | {"max_tokens": 1 << 20}))

    async def _post(self, client: httpx.AsyncClient, request_id: str, body: dict[str, Any]) -> httpx.Response:
        return await client.post(self._url, json=body, headers={"x-request-id": request_id})

    async def _stream(self, client: httpx.AsyncClient, request_id: str, body: dict[str, Any]) -> None:
        answer = await self._post(client, request_id, body)
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        self.ledger.usage[request_id] = chunks[-1]["usage"]

    async def _leave(self, client: httpx.AsyncClient, request_id: str, body: dict[str, Any]) -> None:
        events, enough = 0, self._dice.randint(0, 12)
        headers = {"x-request-id": request_id}
        async with client.stream("POST", self._url, json=body, headers=headers) as answer:
            async for part in answer.aiter_bytes():
                events += part.count(b"data: {")
                if events >= enough:
                    break
        self.ledger.seen[request_id] = events


async def until_idle(running: InProcess) -> None:
    while running.gateway.scheduler.in_flight(MODEL_ID) or running.gateway.scheduler.waiting(MODEL_ID):
        await asyncio.sleep(0.02)


def counted(running: InProcess) -> dict[str, float]:
    value = running.gateway.metrics.registry.get_sample_value
    labels = {"model": MODEL_ID, "key": "anonymous"}
    return {
        name: value(f"llama_gateway_{name}_tokens_total", labels) or 0
        for name in ("prompt", "cached_prompt", "generation")
    }


async def engines_own(running: InProcess) -> dict[str, int]:
    """The engine's own counters, which nothing but this test asks it for."""
    spec = running.backend.process.spec
    transport = httpx.AsyncHTTPTransport(uds=str(spec.endpoint.socket))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        text = (await client.get("/metrics", headers={"authorization": f"Bearer {spec.api_key}"})).text
    values = dict(line.split() for line in text.splitlines() if line.startswith("llamacpp:"))
    cached = int(values["llamacpp:prompt_tokens_cached_total"])
    return {
        "prompt": cached + int(values["llamacpp:prompt_tokens_total"]),
        "cached_prompt": cached,
        "generation": int(values["llamacpp:tokens_predicted_total"]),
    }


def logged(file: Path) -> dict[str, dict[str, Any]]:
    return {line["id"]: line for line in map(json.loads, file.read_text().splitlines())}


def compare(ledger: Ledger, log: dict[str, dict[str, Any]]) -> None:
    for request_id, usage in ledger.usage.items():
        line = log[request_id]
        assert line["outcome"] == "ok"
        assert (line["prompt_tokens"], line["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    for request_id, events in ledger.seen.items():
        # The first event carries the role; what was on its way when the client left was generated too.
        assert log[request_id]["generated_tokens"] >= events - 1
        assert log[request_id]["generated_tokens"] <= 60
    for request_id in ledger.refused:
        assert log[request_id]["generated_tokens"] == log[request_id]["prompt_tokens"] == 0


@rows(29)
@pytest.mark.parametrize("requests", [20, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
@pytest.mark.slow
async def test_counters_equal_the_truth_and_survive_the_engine(
    one_engine: str, demo_model: Path, tmp_path: Path, requests: int
) -> None:
    file = tmp_path / "requests.jsonl"
    settings = {"request_log": {"file": str(file)}}
    async with gateway_in_process(
        one_engine, demo_model, tmp_path, settings=settings, context=256, parallel=2
    ) as running:
        first = Crowd(running, requests // 2)
        await first.run()
        await until_idle(running)
        before, engine = counted(running), await engines_own(running)
        # Those too that nobody has seen: on their way to somebody who left, or kept back by the engine.
        assert before == engine
        with suppress(ProcessLookupError):
            os.killpg(running.backend.process.pid, signal.SIGKILL)
        second = Crowd(running, requests // 2)
        # The same names again would be the same lines.
        second._numbers = iter(range(requests // 2, requests))
        await second.run()
        await until_idle(running)
        total = counted(running)
    log = logged(file)
    assert len(log) == requests
    compare(first.ledger, log)
    compare(second.ledger, log)
    sums: Counter[str] = Counter()
    for line in log.values():
        sums.update(
            prompt=line["prompt_tokens"], cached_prompt=line["cached_tokens"], generation=line["generated_tokens"]
        )
    assert total == dict(sums)
    assert all(total[name] > before[name] > 0 for name in total)
