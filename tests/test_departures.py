"""A client that leaves is let go at once, whatever its request was doing, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checklist import lines, rows
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process

SHORT: list[dict[str, str]] = [{"role": "user", "content": "Count."}]
# Several batches of prefill on any machine that runs tests.
LONG: list[dict[str, str]] = [{"role": "user", "content": "one two three four five " * 400}]
IDLE_SECONDS = 2.0
# A count by hand is for a quiet machine, where 10,000 take about ten minutes.
BY_HAND = "GATEWAY_TEST_DEPARTURES" in os.environ
LONG_RUN = int(os.environ.get("GATEWAY_TEST_DEPARTURES", "200"))
FREE_SECONDS = 1.0
AT_ONCE = 8
STORM = 400


@pytest.fixture
async def served(engine: str, demo_model: Path, tmp_path: Path) -> AsyncIterator[InProcess]:
    async with gateway_in_process(engine, demo_model, tmp_path, context=4096, parallel=2) as running:
        yield running


async def leases_become(served: InProcess, count: int) -> None:
    async with asyncio.timeout(IDLE_SECONDS):
        while served.gateway.scheduler.in_flight(MODEL_ID) != count:
            await asyncio.sleep(0.01)


async def engine_is_idle_but_for(served: InProcess, busy: int) -> None:
    """Asked once at the deadline: asking more often would disturb the engine's own look for closed sockets."""
    await leases_become(served, busy)
    await asyncio.sleep(IDLE_SECONDS)
    assert await served.backend.busy_slots() == busy


@rows(4)
@lines(104, 107)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("beside_another", [True, False])
async def test_leaving_in_mid_answer_frees_the_slot(served: InProcess, stream: bool, beside_another: bool) -> None:
    other = await served.send(messages=SHORT, stream=True, max_tokens=3000) if beside_another else None
    if other is not None:
        await other.until(b"data: ")
    client = await served.send(messages=SHORT, stream=stream, max_tokens=3000)
    if stream:
        await client.until(b"data: ")
    else:
        await leases_become(served, 2 if other else 1)
    await client.close()
    await engine_is_idle_but_for(served, 1 if other else 0)
    if other is not None:
        await other.close()


@rows(4)
@lines(105, 107)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("beside_another", [True, False])
async def test_leaving_in_prefill_frees_the_slot(served: InProcess, stream: bool, beside_another: bool) -> None:
    other = await served.send(messages=SHORT, stream=True, max_tokens=3000) if beside_another else None
    if other is not None:
        await other.until(b"data: ")
    client = await served.send(messages=LONG, stream=stream, max_tokens=1500)
    await leases_become(served, 2 if other else 1)
    await client.close()
    await engine_is_idle_but_for(served, 1 if other else 0)
    assert requests_by_outcome(served) == {"client_gone": 1}
    if other is not None:
        await other.close()


@rows(4)
@lines(106)
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_the_queue_never_reaches_the_engine(served: InProcess, stream: bool) -> None:
    running = [await served.send(messages=SHORT, stream=True, max_tokens=3000) for _ in range(2)]
    for client in running:
        await client.until(b"data: ")
    waiting = await served.send(messages=SHORT, stream=stream, max_tokens=5)
    async with asyncio.timeout(IDLE_SECONDS):
        while served.gateway.scheduler.waiting(MODEL_ID) != 1:
            await asyncio.sleep(0.01)
    await waiting.close()
    async with asyncio.timeout(IDLE_SECONDS):
        while served.gateway.scheduler.waiting(MODEL_ID) != 0:
            await asyncio.sleep(0.01)
    assert served.gateway.scheduler.in_flight(MODEL_ID) == 2
    for client in running:
        await client.close()
    await engine_is_idle_but_for(served, 0)
    outcomes = requests_by_outcome(served)
    assert outcomes == {"client_gone": 3}


def requests_by_outcome(served: InProcess) -> dict[str, float]:
    samples = served.gateway.metrics.requests.collect()[0].samples
    counted = [sample for sample in samples if sample.name.endswith("_total") and sample.value]
    return {sample.labels["outcome"]: sample.value for sample in counted}


@lines(110)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("departures", [40, pytest.param(LONG_RUN, marks=pytest.mark.slow)])
async def test_departures_leak_nothing(served: InProcess, departures: int) -> None:
    # Connections that the gateway keeps open to the engine are part of the baseline.
    first = await served.send(messages=SHORT, stream=True, max_tokens=4)
    await first.until(b"[DONE]")
    await first.close()
    await settled(served)
    tasks, files = len(asyncio.all_tasks()), psutil.Process().num_fds()
    choose, left, free = random.Random(0), 0, list[bool]()
    while left < departures:
        storm = min(STORM, departures - left)
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(depart(served, choose, storm // AT_ONCE))
        left += storm
        await engine_worked_off(served)
        if BY_HAND:
            free.append(await is_free_at_once(served, choose))
            await engine_worked_off(served)
    await settled(served)
    assert len(asyncio.all_tasks()) == tasks
    assert psutil.Process().num_fds() <= files + 2
    assert served.gateway.scheduler.in_flight(MODEL_ID) == 0
    assert served.gateway.scheduler.waiting(MODEL_ID) == 0
    assert all(free), f"{free.count(False)} of {len(free)} slots were busy {FREE_SECONDS} s after their client left"


async def depart(served: InProcess, choose: random.Random, times: int) -> None:
    """Ask and leave, each time at another stage."""
    stages: list[Callable[[Any], Awaitable[object]]] = [
        lambda client: asyncio.sleep(0),
        lambda client: leases_become_any(served),
        lambda client: asyncio.wait_for(client.reader.read(1), 0.2),
    ]
    for _ in range(times):
        client = await served.send(
            messages=choose.choice([SHORT, LONG]), stream=choose.random() < 0.5, max_tokens=choose.choice([1, 2000])
        )
        with suppress(TimeoutError):
            await choose.choice(stages)(client)
        await client.close()


async def engine_worked_off(served: InProcess) -> None:
    """It has in its own queue what the storm left; each question is far from the next."""
    async with asyncio.timeout(30):
        while await served.backend.busy_slots():
            await asyncio.sleep(IDLE_SECONDS)


async def is_free_at_once(served: InProcess, choose: random.Random) -> bool:
    """One departure by itself, in the prompt or in the answer: the engine is asked once, at the deadline."""
    client = await served.send(messages=choose.choice([SHORT, LONG]), stream=True, max_tokens=2000)
    await leases_become(served, 1)
    await asyncio.sleep(choose.random() * 0.3)
    await client.close()
    await leases_become(served, 0)
    await asyncio.sleep(FREE_SECONDS)
    return await served.backend.busy_slots() == 0


async def leases_become_any(served: InProcess) -> None:
    async with asyncio.timeout(IDLE_SECONDS):
        while served.gateway.scheduler.in_flight(MODEL_ID) == 0:
            await asyncio.sleep(0.005)


async def settled(served: InProcess) -> None:
    """Until every exchange has been taken down and closed connections have been forgotten."""
    async with asyncio.timeout(10):
        while served.gateway.scheduler.in_flight(MODEL_ID) or any(
            "ExchangeResponse" in repr(task.get_coro()) for task in asyncio.all_tasks()
        ):
            await asyncio.sleep(0.05)
    # The keep-alive of pooled connections to the engine.
    await asyncio.sleep(4)
