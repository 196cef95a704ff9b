"""The sum of all charges is the sum of what the engine did, with clients that leave in mid-stream and in the queue.

``GATEWAY_TEST_CHARGES=5000`` is the whole measure; CI runs a small part of it.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.credential import new_key
from tests.inprocess import Client, InProcess, gateway_in_process
from tests.test_token_truth import engines_own, until_idle

_REQUESTS = int(os.environ.get("GATEWAY_TEST_CHARGES", "60"))
_SLOTS = 2
_LEAVE = 0.05
_WORDS = ("red", "green", "blue", "what is the capital of France?", "北京", "say 🌍 twice")

pytestmark = pytest.mark.slow


class Crowd:
    """Four clients per slot, so that some always wait; one request in twenty is left."""

    def __init__(self, running: InProcess, secret: str) -> None:
        self.left_in_stream = self.left_before = self.answered_tokens = 0
        self._running = running
        self._secret = secret
        self._dice = random.Random(11)
        self._numbers = iter(range(_REQUESTS))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(4 * _SLOTS):
                group.create_task(self._visit())

    async def _visit(self) -> None:
        for _ in self._numbers:
            client = Client(*await asyncio.open_connection("127.0.0.1", self._running.port))
            leaves = self._dice.random() < _LEAVE
            fields: dict[str, Any] = {"messages": [{"role": "user", "content": self._dice.choice(_WORDS)}]}
            fields |= {"max_tokens": 30 if leaves else self._dice.choice([1, 2, 4]), "stream": leaves}
            await self._running.send_on(client, key=self._secret, **fields)
            if not leaves:
                self.answered_tokens += await _total_tokens(client)
            elif self._dice.random() < 0.5:
                await self._leave_in_stream(client)
            else:
                await self._leave_before(client)
            await client.close()

    async def _leave_in_stream(self, client: Client) -> None:
        for _ in range(self._dice.randint(1, 8)):
            await client.until(b"data: ")
        self.left_in_stream += 1

    async def _leave_before(self, client: Client) -> None:
        """In the queue or, if its turn comes meanwhile, wherever it is."""
        await asyncio.sleep(self._dice.uniform(0, 0.3))
        self.left_before += 1


async def _total_tokens(client: Client) -> int:
    head = (await client.until(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    length = int(head.partition(b"content-length: ")[2].split()[0])
    return int(orjson.loads(await client.reader.readexactly(length))["usage"]["total_tokens"])


async def charged(running: InProcess) -> int:
    [key] = running.gateway.authenticator
    figures = await running.gateway.proxy.quota.usage(key.name, key.limits)
    return int(figures["tokens_per_day"]["used"])


@pytest.mark.timeout(3000)
async def test_charges_are_what_the_engine_did(one_engine: str, demo_model: Path, tmp_path: Path) -> None:
    secret, digest = new_key()
    keys = [{"name": "alice", "hash": digest, "tokens_per_day": 1 << 40}]
    async with gateway_in_process(
        one_engine, demo_model, tmp_path, settings={"keys": keys}, context=256, parallel=_SLOTS
    ) as running:
        crowd = Crowd(running, secret)
        await crowd.run()
        await until_idle(running)
        engine = await engines_own(running)
        used = await charged(running)
    print(f"{_REQUESTS} requests, {crowd.left_in_stream} left in the stream, {crowd.left_before} before: ", end="")
    print(f"charged {used}, engine {engine['prompt'] + engine['generation']} {engine}")
    assert crowd.left_in_stream + crowd.left_before > 0
    assert used >= crowd.answered_tokens
    assert used == engine["prompt"] + engine["generation"]
