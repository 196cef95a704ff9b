"""What a key may use: no limit is passed, nothing is lost, and no jump of a clock gives anything twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import ConfigError, GatewayError, UpstreamFailed
from app.quota import (
    Amounts,
    BudgetSpent,
    Ledger,
    Limits,
    MemoryStore,
    Quota,
    RateLimited,
    SteadyClock,
    open_store,
    rate_headers,
)
from app.quota.refusals import TooLargeForLimit, span

NOON = 1_800_000_100.0


class Time:
    """A machine's wall clock and its counter, moved by hand."""

    def __init__(self, *, boot: str = "first") -> None:
        self.wall, self.steady, self.boot = NOON, 1000.0, boot

    def clock(self) -> SteadyClock:
        return SteadyClock(wall=lambda: self.wall, steady=lambda: self.steady, boot=lambda: self.boot)

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


def _quota(time: Time | None = None) -> tuple[Quota, MemoryStore]:
    store = MemoryStore(clock=(time or Time()).clock())
    return Quota(store), store


async def use(quota: Quota, limits: Limits, *, reserve: int, charge: int | None = None) -> None:
    async with quota.reserve("k", limits, tokens=reserve) as reservation:
        if charge is not None:
            reservation.charge(tokens=charge)


async def used(quota: Quota, limits: Limits, window: str = "tokens_per_day") -> int:
    return int((await quota.usage("k", limits))[window]["used"])


# Reserve, settle, refund


async def test_what_is_reserved_counts_until_what_was_used_takes_its_place() -> None:
    quota, _ = _quota()
    limits = Limits(tokens_per_day=1000)
    async with quota.reserve("k", limits, tokens=700) as reservation:
        assert await used(quota, limits) == 700
        with pytest.raises(BudgetSpent):
            await use(quota, limits, reserve=301)
        await use(quota, limits, reserve=300, charge=100)
        reservation.charge(tokens=50)
        reservation.charge(tokens=250)
    assert await used(quota, limits) == 350


async def test_a_failure_of_ours_costs_nothing() -> None:
    quota, _ = _quota()
    limits = Limits(requests_per_minute=1)
    with pytest.raises(UpstreamFailed):
        async with quota.reserve("k", limits, tokens=700):
            raise UpstreamFailed("gone")
    assert await used(quota, limits) == 0
    await use(quota, limits, reserve=1)


async def test_what_was_generated_before_a_failure_or_a_departure_is_charged() -> None:
    quota, _ = _quota()
    limits = Limits(tokens_per_day=1000)
    with pytest.raises(UpstreamFailed):
        async with quota.reserve("k", limits, tokens=700) as reservation:
            reservation.charge(tokens=30)
            raise UpstreamFailed("gone")
    entered = asyncio.Event()

    async def leave() -> None:
        async with quota.reserve("k", limits, tokens=700) as reservation:
            reservation.charge(tokens=12)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(leave())
    await entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await used(quota, limits) == 42


async def test_who_leaves_before_anything_was_done_has_made_a_request() -> None:
    quota, _ = _quota()
    limits = Limits(requests_per_minute=1)
    await use(quota, limits, reserve=700)
    assert await used(quota, limits) == 0
    with pytest.raises(RateLimited):
        await use(quota, limits, reserve=1)


@pytest.mark.parametrize("window", ["requests_per_minute", "tokens_per_minute"])
async def test_a_minutes_limit_names_the_time_to_come_back(window: str) -> None:
    time = Time()
    quota, _ = _quota(time)
    limits = Limits(**{window: 10})
    for _ in range(10):
        await use(quota, limits, reserve=1, charge=1)
    time.passes(17)
    with pytest.raises(RateLimited) as refusal:
        await use(quota, limits, reserve=1)
    headers = refusal.value.headers()
    assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
    assert "x-should-retry" not in headers
    time.passes(int(headers["retry-after"]))
    await use(quota, limits, reserve=1)


async def test_a_spent_day_is_not_to_be_tried_again() -> None:
    quota, _ = _quota()
    limits = Limits(tokens_per_day=10)
    await use(quota, limits, reserve=10, charge=10)
    with pytest.raises(BudgetSpent, match="enough is free in 23h") as refusal:
        await use(quota, limits, reserve=1)
    assert (refusal.value.status, refusal.value.code) == (429, "insufficient_quota")
    assert refusal.value.headers() == {"x-should-retry": "false"}


@pytest.mark.parametrize("limits", [Limits(tokens_per_minute=99), Limits(tokens_per_day=99)])
async def test_a_request_over_the_limit_by_itself_is_told_so(limits: Limits) -> None:
    quota, _ = _quota()
    with pytest.raises(TooLargeForLimit, match="this request alone") as refusal:
        await use(quota, limits, reserve=100)
    assert refusal.value.headers() == {"x-should-retry": "false"}
    await use(quota, limits, reserve=99)


@pytest.mark.parametrize(
    "limits",
    [Limits(requests_per_minute=0), Limits(tokens_per_day=0), Limits(gpu_seconds_per_day=0), Limits(concurrent=0)],
)
async def test_a_budget_of_nothing_is_nothing(limits: Limits) -> None:
    quota, _ = _quota()
    with pytest.raises(BudgetSpent, match=" 0: it may not"):
        await use(quota, limits, reserve=0)


async def test_seconds_of_the_gpu() -> None:
    quota, _ = _quota()
    limits = Limits(gpu_seconds_per_day=2)
    async with quota.reserve("k", limits, tokens=1) as reservation:
        reservation.charge(tokens=1, gpu_seconds=2.001)
    with pytest.raises(BudgetSpent):
        await use(quota, limits, reserve=1)
    assert (await quota.usage("k", limits))["gpu_seconds_per_day"]["used"] == 2.001


async def test_so_many_at_a_time() -> None:
    quota, _ = _quota()
    limits = Limits(concurrent=2)
    async with quota.reserve("k", limits, tokens=1), quota.reserve("k", limits, tokens=1):
        with pytest.raises(RateLimited, match="2 requests open") as refusal:
            await use(quota, limits, reserve=1)
        assert refusal.value.headers() == {"retry-after": "1"}
        async with quota.reserve("other", limits, tokens=1):
            pass
    await use(quota, limits, reserve=1)


async def test_a_hundred_at_once_get_no_more_than_there_is() -> None:
    quota, _ = _quota()
    limits = Limits(tokens_per_day=1000)
    await use(quota, limits, reserve=950, charge=950)
    results = await asyncio.gather(
        *(use(quota, limits, reserve=20, charge=20) for _ in range(100)), return_exceptions=True
    )
    assert sum(result is None for result in results) == 2
    assert await used(quota, limits) == 990


async def test_headers_name_the_tightest_limit() -> None:
    quota, _ = _quota()
    limits = Limits(requests_per_minute=5, tokens_per_minute=1000, tokens_per_day=600)
    async with quota.reserve("k", limits, tokens=100) as reservation:
        headers = dict(reservation.headers())
    assert headers[b"x-ratelimit-limit-requests"] == b"5"
    assert headers[b"x-ratelimit-remaining-requests"] == b"4"
    assert headers[b"x-ratelimit-limit-tokens"] == b"600"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"500"
    assert headers[b"x-ratelimit-reset-requests"] in (b"60s", b"1m0s")
    assert headers[b"x-ratelimit-reset-tokens"].startswith(b"2")
    async with quota.reserve("k", Limits(), tokens=1) as unlimited:
        assert unlimited.headers() == []
    assert rate_headers(()) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0115, "12ms"), (1, "1s"), (59.5, "1m0s"), (360, "6m0s"), (7200, "2h0m0s")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


# Windows and clocks


async def test_use_leaves_the_window_with_its_bucket() -> None:
    time = Time()
    quota, _ = _quota(time)
    limits = Limits(tokens_per_minute=100)
    await use(quota, limits, reserve=60, charge=60)
    time.passes(30)
    await use(quota, limits, reserve=40, charge=40)
    time.passes(29)
    with pytest.raises(RateLimited):
        await use(quota, limits, reserve=1)
    time.passes(1)
    await use(quota, limits, reserve=60, charge=60)
    with pytest.raises(RateLimited):
        await use(quota, limits, reserve=1)


async def test_what_ends_after_its_window_changes_nothing() -> None:
    time = Time()
    quota, _ = _quota(time)
    limits = Limits(tokens_per_minute=100)
    async with quota.reserve("k", limits, tokens=100) as reservation:
        time.passes(61)
        await use(quota, limits, reserve=100, charge=70)
        reservation.charge(tokens=3)
    assert await used(quota, limits, "tokens_per_minute") == 70


@pytest.mark.parametrize("jump", [3600, -3600, 86_400, -86_400, 40 * 365 * 86_400])
async def test_a_jump_of_the_wall_clock_grants_nothing(jump: float) -> None:
    time = Time()
    quota, _ = _quota(time)
    limits = Limits(tokens_per_day=10, requests_per_minute=1)
    await use(quota, limits, reserve=10, charge=10)
    time.wall += jump
    with pytest.raises(RateLimited):
        await use(quota, limits, reserve=1)
    time.passes(61)
    with pytest.raises(BudgetSpent):
        await use(quota, limits, reserve=1)


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 1e9])
def test_a_new_process_on_the_same_machine_believes_the_counter(jump: float) -> None:
    time = Time()
    mark = time.clock().mark()
    time.passes(100)
    time.wall += jump
    clock = time.clock()
    clock.resume(mark)
    assert clock.now() == NOON + 100


@pytest.mark.parametrize(("jump", "expected"), [(3600.0, NOON + 3600), (-3600.0, NOON)])
def test_after_a_restart_of_the_machine_the_clock_never_goes_back(jump: float, expected: float) -> None:
    time = Time()
    mark = time.clock().mark()
    time.boot, time.steady = "second", 5.0
    time.wall += jump
    clock = time.clock()
    clock.resume(mark)
    assert clock.now() == expected


_STEP = st.tuples(st.integers(0, 40), st.integers(0, 120), st.integers(0, 90))


@given(st.lists(_STEP, max_size=60))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_no_minute_ever_holds_more_than_its_limit(steps: list[tuple[int, int, int]]) -> None:
    """Reserve up to 40, charge up to three times as much as bounds allow never happens: at most what was reserved."""
    ledger, now, limits = Ledger(), NOON, Limits(tokens_per_minute=100)
    spent: list[tuple[float, int]] = []
    for wanted, share, pause in steps:
        now += pause / 3
        try:
            ticket = ledger.reserve("k", limits, Amounts(1, wanted), now=now)
        except GatewayError:
            continue
        actual = wanted * share // 120
        ledger.settle(ticket, Amounts(1, actual), now=now)
        spent.append((now, actual))
        assert sum(amount for at, amount in spent if int(at) > int(now) - 60) <= 100
        standing = next(one for one in ledger.standing("k", limits, now=now) if one.window.label == "tokens_per_minute")
        assert standing.spent == sum(amount for at, amount in spent if int(at) > int(now) - 60)
    assert ledger.open_requests("k") == 0


# The address of the store


@pytest.mark.parametrize("address", ["", "sqlite", "mysql://h/db", "quota.db", "redis"])
def test_an_unknown_store_is_a_mistake_of_the_configuration(address: str) -> None:
    with pytest.raises(ConfigError, match=r"quota\.store"):
        open_store(address, base=Path("/"), fail_open=False)


def test_an_address_with_a_password_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as error:
        open_store("mongo:secret@h", base=Path("/"), fail_open=False)
    assert "@h" not in error.value.message
