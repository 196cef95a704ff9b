"""Budgets that several gateways share: one script decides, and a store that is gone keeps nobody waiting."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.errors import UpstreamFailed
from app.quota import BudgetSpent, Limits, Quota, QuotaUnavailable, RateLimited, open_store
from tests.test_quota import use, used

pytest.importorskip("redis", reason="the package redis is not installed; install llama-gateway[redis]")

LIMITS = Limits(tokens_per_day=1000)


class Server:
    """A Redis or Valkey server on a socket of its own."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self.socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([self._program, *options], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        while b"ready to accept connections" not in (line := self._process.stdout.readline()).lower():
            assert line, "the server has ended"

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server or valkey-server on this machine; apt-get install redis-server")
    server = Server(program, tmp_path)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def opened(server: Server, *, fail_open: bool = False) -> AsyncIterator[Quota]:
    quota = Quota(open_store(f"unix:{server.socket}", base=Path("/"), fail_open=fail_open))
    await quota.open()
    try:
        yield quota
    finally:
        await quota.close()


async def settled(quota: Quota, tokens: int) -> None:
    """Settling happens behind the request's back."""
    async with asyncio.timeout(5):
        while await used(quota, LIMITS) != tokens:
            await asyncio.sleep(0.01)


async def test_two_gateways_share_a_budget(server: Server) -> None:
    async with opened(server) as one, opened(server) as other:
        async with one.reserve("k", LIMITS, tokens=700) as reservation:
            with pytest.raises(BudgetSpent):
                await use(other, LIMITS, reserve=301)
            assert dict(reservation.headers())[b"x-ratelimit-remaining-tokens"] == b"300"
            reservation.charge(tokens=100)
        await settled(other, 100)
        await use(other, LIMITS, reserve=900, charge=900)
        await settled(one, 1000)
        assert await used(one, LIMITS, "requests_per_day") == 2
    async with opened(server) as third:
        with pytest.raises(BudgetSpent):
            await use(third, LIMITS, reserve=1)


async def test_a_hundred_at_two_gateways_get_no_more_than_there_is(server: Server) -> None:
    async with opened(server) as one, opened(server) as other:
        await use(one, LIMITS, reserve=950, charge=950)
        await settled(one, 950)
        wishes = (use(quota, LIMITS, reserve=20, charge=20) for quota in [one, other] * 50)
        results = await asyncio.gather(*wishes, return_exceptions=True)
        assert sum(result is None for result in results) == 2
        assert {type(result) for result in results if result is not None} == {BudgetSpent}
        await settled(one, 990)


async def test_concurrent_requests_are_counted_over_all(server: Server) -> None:
    limits = Limits(concurrent=1)
    async with opened(server) as one, opened(server) as other:
        async with one.reserve("k", limits, tokens=1):
            with pytest.raises(RateLimited, match="1 requests open"):
                await use(other, limits, reserve=1)
        async with asyncio.timeout(5):
            while True:
                try:
                    await use(other, limits, reserve=1)
                    break
                except RateLimited:
                    await asyncio.sleep(0.01)


async def test_a_minutes_limit_and_a_refund(server: Server) -> None:
    limits = Limits(requests_per_minute=1, tokens_per_day=1000)
    async with opened(server) as quota:
        with pytest.raises(UpstreamFailed):
            async with quota.reserve("k", limits, tokens=10):
                raise UpstreamFailed("gone")
        await settled(quota, 0)
        await use(quota, limits, reserve=10, charge=10)
        with pytest.raises(RateLimited) as refusal:
            await use(quota, limits, reserve=10)
        assert 1 <= int(refusal.value.headers()["retry-after"]) <= 60
        with pytest.raises(BudgetSpent):
            await use(quota, Limits(tokens_per_day=0), reserve=0)


async def test_who_leaves_while_the_store_is_asked_has_reserved_nothing(server: Server) -> None:
    async with opened(server) as quota:
        tasks = [asyncio.create_task(use(quota, LIMITS, reserve=10)) for _ in range(30)]
        for turns, task in enumerate(tasks):
            for _ in range(turns % 5):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settled(quota, 0)
        await use(quota, Limits(concurrent=1), reserve=1)


@pytest.mark.parametrize("fail_open", [True, False])
async def test_a_store_that_is_gone_keeps_nobody_waiting(server: Server, fail_open: bool) -> None:
    async with opened(server, fail_open=fail_open) as quota:
        await use(quota, LIMITS, reserve=600, charge=600)
        await settled(quota, 600)
        server.stop()
        for _ in range(2):
            started = time.monotonic()
            if fail_open:
                await use(quota, LIMITS, reserve=150, charge=150)
            else:
                with pytest.raises(QuotaUnavailable):
                    await use(quota, LIMITS, reserve=150)
            assert time.monotonic() - started < 1
        if fail_open:
            # This gateway's own cap: 600 before and 300 since.
            with pytest.raises(BudgetSpent):
                await use(quota, LIMITS, reserve=101)
        await use(quota, Limits(), reserve=10)
        server.start()
        # It has come back empty: we see its figures again, not our own.
        async with asyncio.timeout(10):
            while await used(quota, LIMITS) > 0:
                await asyncio.sleep(0.05)
        await use(quota, LIMITS, reserve=1000)


async def test_a_store_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    async def listen_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    hanging = await asyncio.start_unix_server(listen_only, tmp_path / "s.sock")
    async with hanging:
        quota = Quota(open_store(f"unix:{tmp_path / 's.sock'}", base=Path("/"), fail_open=False))
        await quota.open()
        started = time.monotonic()
        with pytest.raises(QuotaUnavailable):
            await use(quota, LIMITS, reserve=1)
        assert time.monotonic() - started < 1
        await quota.close()
