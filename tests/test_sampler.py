"""The background sample: what it shows, what it takes back, and that nothing ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.auth import ANONYMOUS, ApiKey
from app.engine.binary import EngineBinary
from app.events import EventLog
from app.quota import Limits, Quota, open_store
from app.sampler import Sampler
from app.scheduler import Scheduler
from app.slowdown import SlowdownWatch
from tests.fleet import Fleet, fake_engine_binary, fleet_of


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


class Bench:
    """A sampler over one fake engine; ``keys`` may be changed."""

    def __init__(self, fleet: Fleet, quota: Quota) -> None:
        self.fleet = fleet
        self.quota = quota
        self.keys: list[ApiKey] = [ANONYMOUS]
        self.fails = 0
        self.sampled = asyncio.Event()
        self.scheduler = Scheduler(fleet.metrics)
        self.sampler = Sampler(
            fleet.metrics,
            supervisor=fleet.supervisor,
            scheduler=self.scheduler,
            quota=quota,
            keys=self._keys,
            slowdowns=SlowdownWatch(fleet.metrics, EventLog()),
            interval_seconds=0.01,
        )

    def value(self, metric: str, **labels: str) -> float | None:
        return self.fleet.metrics.registry.get_sample_value(f"llama_gateway_{metric}", labels)

    def _keys(self) -> list[ApiKey]:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no keys today")
        self.sampled.set()
        return self.keys


@asynccontextmanager
async def bench(fake: EngineBinary, model: Path, folder: Path) -> AsyncIterator[Bench]:
    quota = Quota(open_store("memory:", base=folder, fail_open=False))
    await quota.open()
    try:
        async with fleet_of(fake, model, {"a": {}}) as fleet:
            yield Bench(fleet, quota)
    finally:
        await quota.close()


async def test_an_engine_is_shown_while_it_lives(fake: EngineBinary, demo_model: Path, tmp_path: Path) -> None:
    async with bench(fake, demo_model, tmp_path) as here:
        await here.sampler.sample()
        assert here.value("engine_resident_bytes", model="a") == 0
        assert here.value("kv_tokens", model="a", kind="capacity") == 0
        # Nothing happened yet, and a rate needs a zero to start from.
        assert here.value("engine_restarts_total", model="a", cause="crash") == 0
        assert here.value("model_slow", model="a", cause="decode_speed") == 0
        await here.fleet.supervisor.ready(here.fleet.model("a"))
        await here.sampler.sample()
        assert (here.value("engine_resident_bytes", model="a") or 0) > 1 << 20
        assert (here.value("kv_tokens", model="a", kind="capacity") or 0) >= 512
        assert (here.value("engine_major_page_faults_total", model="a") or 0) >= 0


async def test_queues_are_read_when_somebody_asks(fake: EngineBinary, demo_model: Path, tmp_path: Path) -> None:
    async with bench(fake, demo_model, tmp_path) as here:
        await here.sampler.sample()
        async with here.scheduler.lease("a", key="k", capacity=2, max_queue=1):
            assert here.value("slots", model="a", state="busy") == 1
        here.fleet.metrics.forget_model("a")
        assert here.value("slots", model="a", state="busy") is None
        # A model that a reload brings back has its gauges again.
        await here.sampler.sample()
        async with here.scheduler.lease("a", key="k", capacity=2, max_queue=1):
            assert here.value("slots", model="a", state="busy") == 1


async def test_budgets_come_and_go_with_the_limits(fake: EngineBinary, demo_model: Path, tmp_path: Path) -> None:
    async with bench(fake, demo_model, tmp_path) as here:
        limits = Limits(tokens_per_day=1000)
        here.keys = [ApiKey("alice", frozenset("*"), limits=limits), ANONYMOUS]
        async with here.quota.reserve("alice", limits, tokens=40):
            await here.sampler.sample()
        assert here.value("budget_used", key="alice", window="tokens_per_day") == 40
        assert here.value("budget_limit", key="alice", window="tokens_per_day") == 1000
        assert here.value("budget_limit", key="alice", window="requests_per_day") is None
        assert here.value("budget_limit", key="anonymous", window="tokens_per_day") is None
        here.keys = [ANONYMOUS]
        await here.sampler.sample()
        assert here.value("budget_used", key="alice", window="tokens_per_day") is None


async def test_a_sample_that_fails_is_reported_and_not_the_last(
    fake: EngineBinary, demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(fake, demo_model, tmp_path) as here:
        here.fails = 2
        running = asyncio.create_task(here.sampler.run())
        try:
            with caplog.at_level(logging.ERROR):
                async with asyncio.timeout(20):
                    await here.sampled.wait()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert [record.message for record in caplog.records] == ["the machine could not be sampled"] * 2
