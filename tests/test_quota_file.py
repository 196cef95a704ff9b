"""The quota file: survives every end of the process, a full disk and damage."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.errors import StorageError
from app.quota import BudgetSpent, Limits, Quota, QuotaUnavailable, SQLiteStore, open_store
from tests.test_quota import Time, use, used

_ROOT = Path(__file__).parent.parent
LIMITS = Limits(tokens_per_day=1000)


@asynccontextmanager
async def opened(path: Path, *, fail_open: bool = False, time: Time | None = None) -> AsyncIterator[Quota]:
    quota = Quota(SQLiteStore(path, fail_open=fail_open, clock=(time or Time()).clock()))
    await quota.open()
    try:
        yield quota
    finally:
        await quota.close()


async def test_use_outlives_the_process(tmp_path: Path) -> None:
    async with opened(tmp_path / "state" / "quota.db") as quota:
        await use(quota, LIMITS, reserve=700, charge=300)
    async with opened(tmp_path / "state" / "quota.db") as quota:
        assert await used(quota, LIMITS) == 300
        with pytest.raises(BudgetSpent):
            await use(quota, LIMITS, reserve=701)
        await use(quota, LIMITS, reserve=700, charge=700)


@pytest.mark.parametrize("jump", [3600, -3600, 10 * 86_400])
async def test_a_jump_of_the_clock_between_two_processes_grants_nothing(tmp_path: Path, jump: float) -> None:
    moment = Time()
    async with opened(tmp_path / "quota.db", time=moment) as quota:
        await use(quota, LIMITS, reserve=1000, charge=1000)
    moment.passes(10)
    moment.wall += jump
    async with opened(tmp_path / "quota.db", time=moment) as quota:
        with pytest.raises(BudgetSpent):
            await use(quota, LIMITS, reserve=1)
    moment.passes(86_400)
    async with opened(tmp_path / "quota.db", time=moment) as quota:
        await use(quota, LIMITS, reserve=1000)


def _copied(folder: Path) -> Path:
    copy = folder / "copy"
    copy.mkdir()
    for part in folder.glob("quota.db*"):
        (copy / part.name).write_bytes(part.read_bytes())
    return copy


def _moved_aside(folder: Path) -> list[Path]:
    return [part for part in folder.iterdir() if ".damaged-" in part.name]


async def test_a_reservation_is_in_the_file_before_it_is_granted(tmp_path: Path) -> None:
    async with opened(tmp_path / "quota.db") as quota, quota.reserve("k", LIMITS, tokens=600):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite3.connect(tmp_path / "quota.db", timeout=0).execute("SELECT * FROM used")
        copy = _copied(tmp_path)
        async with opened(copy / "quota.db") as second:
            assert await used(second, LIMITS) == 600


async def test_a_second_gateway_on_the_same_file_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "quota.db"):
        second = Quota(SQLiteStore(tmp_path / "quota.db"))
        with pytest.raises(StorageError, match="in use by another gateway"):
            await second.open()
        await second.close()


async def test_a_hundred_at_once_get_no_more_than_there_is(tmp_path: Path) -> None:
    async with opened(tmp_path / "quota.db") as quota:
        await use(quota, LIMITS, reserve=950, charge=950)
        wishes = (use(quota, LIMITS, reserve=20, charge=20) for _ in range(100))
        results = await asyncio.gather(*wishes, return_exceptions=True)
        assert sum(result is None for result in results) == 2
    async with opened(tmp_path / "quota.db") as quota:
        assert await used(quota, LIMITS) == 990


async def test_who_leaves_while_it_is_written_down_has_reserved_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "quota.db") as quota:
        tasks = [asyncio.create_task(use(quota, LIMITS, reserve=1)) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await used(quota, LIMITS) == 0
        await use(quota, Limits(concurrent=1), reserve=1)


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_damaged_file_is_moved_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "quota.db"
    path.write_bytes(content)
    async with opened(path) as quota:
        await use(quota, LIMITS, reserve=700, charge=300)
    assert [part.read_bytes() for part in _moved_aside(tmp_path)] == ([content] if content else [])
    assert ("is damaged" in caplog.text) == bool(content)
    async with opened(path) as quota:
        assert await used(quota, LIMITS) == 300


async def test_a_page_that_rots_is_found(tmp_path: Path) -> None:
    path = tmp_path / "quota.db"
    async with opened(path) as quota:
        await use(quota, LIMITS, reserve=700, charge=300)
    content = bytearray(path.read_bytes())
    content[4096:] = random.Random(1).randbytes(len(content) - 4096)
    path.write_bytes(content)
    async with opened(path) as quota:
        await use(quota, LIMITS, reserve=1000)
    assert _moved_aside(tmp_path)


async def test_rows_of_another_program_are_damage(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "quota.db") as connection:
        connection.execute("CREATE TABLE used (key, window, bucket, amount)")
        connection.execute("INSERT INTO used VALUES ('k', 'tokens_per_day', 'x', -5)")
    connection.close()
    async with opened(tmp_path / "quota.db") as quota:
        assert await used(quota, LIMITS) == 0


async def test_a_folder_that_cannot_be_made_is_the_operators_business(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    quota = Quota(open_store("sqlite:file/quota.db", base=tmp_path, fail_open=True))
    with pytest.raises(StorageError, match=r"set quota\.store"):
        await quota.open()
    await quota.close()


class Disk:
    """A file that SQLite may or may not make larger."""

    def __init__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def close(self) -> None:
        self.free()
        signal.signal(signal.SIGXFSZ, self._handler)


if sys.platform != "win32":
    import resource


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of file sizes")
@pytest.mark.parametrize("fail_open", [True, False])
async def test_a_full_disk(tmp_path: Path, fail_open: bool) -> None:
    disk = Disk()
    try:
        async with opened(tmp_path / "quota.db", fail_open=fail_open) as quota:
            await use(quota, LIMITS, reserve=100, charge=100)
            disk.fill()
            started = time.monotonic()
            if fail_open:
                await use(quota, LIMITS, reserve=100, charge=100)
                # What is in memory limits as before.
                with pytest.raises(BudgetSpent):
                    await use(quota, LIMITS, reserve=801)
            else:
                with pytest.raises(QuotaUnavailable) as refusal:
                    await use(quota, LIMITS, reserve=100)
                assert (refusal.value.status, refusal.value.headers()["retry-after"]) == (503, "5")
            assert time.monotonic() - started < 1
            # Who has no limits is served all the same.
            await use(quota, Limits(), reserve=100, charge=0)
            disk.free()
            async with asyncio.timeout(5):
                while True:
                    try:
                        await use(quota, LIMITS, reserve=0, charge=0)
                        break
                    except QuotaUnavailable:
                        pass
    finally:
        disk.close()
    async with opened(tmp_path / "quota.db") as quota:
        assert await used(quota, LIMITS) == (200 if fail_open else 100)


# Killed at any moment


def _kill_at_random(path: Path, *, limit: int, times: int, seed: int) -> None:
    choose, spent = random.Random(seed), 0
    for _ in range(times):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.quota_victim", str(path), str(limit)], stdout=subprocess.PIPE, cwd=_ROOT
        ) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"ready 0\n"
            time.sleep(choose.random() * 0.05)
            os.kill(victim.pid, signal.SIGKILL)
            lines = victim.stdout.read().splitlines()
        spent += sum(int(line.split()[1]) for line in lines)
        with sqlite3.connect(path) as connection:
            rows = connection.execute("SELECT amount FROM used WHERE window = 'tokens_per_day'").fetchall()
        connection.close()
        amounts = [amount for (amount,) in rows]
        assert all(amount >= 0 for amount in amounts)
        assert spent <= sum(amounts) <= limit, (spent, amounts)
    assert spent > 0


def test_killed_at_any_moment_nothing_is_lost(tmp_path: Path) -> None:
    _kill_at_random(tmp_path / "quota.db", limit=60_000, times=30, seed=1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_a_thousand_times_nothing_is_lost(tmp_path: Path) -> None:
    for run in range(10):
        _kill_at_random(tmp_path / f"quota{run}.db", limit=200_000, times=100, seed=run)
