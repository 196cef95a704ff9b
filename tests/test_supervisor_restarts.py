"""When an engine that died is started again, and when no more: the rules on a virtual clock, then for real."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from app.engine.binary import EngineBinary
from app.errors import ModelFailed
from app.supervisor.restarts import Again, GiveUp, RestartPolicy, RestartRules
from tests.fleet import Fleet, fake_engine_binary, fleet_of
from tests.gateway import is_alive


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


def delay_of(verdict: Again | GiveUp) -> float:
    assert isinstance(verdict, Again)
    return verdict.delay_seconds


def quick() -> RestartPolicy:
    return RestartPolicy(RestartRules(first_delay=0.02, half_open=0.5))


# The rules


def test_back_off_doubles_up_to_a_minute() -> None:
    policy = RestartPolicy(RestartRules(ready_restarts=100), dice=lambda: 0.5)
    delays = []
    for life in range(9):
        policy.became_ready(life * 1000.0)
        delays.append(delay_of(policy.ended(life * 1000.0 + 100, permanent=False)))
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(("dice", "delay"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_back_off_has_jitter(dice: float, delay: float) -> None:
    policy = RestartPolicy(dice=lambda: dice)
    policy.became_ready(0)
    assert delay_of(policy.ended(1, permanent=False)) == pytest.approx(delay)


def test_the_sixth_death_within_a_minute_is_the_last() -> None:
    policy = RestartPolicy()
    for death in range(5):
        policy.became_ready(death * 10.0)
        assert isinstance(policy.ended(death * 10.0 + 3, permanent=False), Again)
    policy.became_ready(50)
    assert policy.ended(53, permanent=False) == GiveUp(300)


def test_deaths_over_a_longer_time_only_slow_it_down() -> None:
    policy = RestartPolicy()
    for death in range(50):
        policy.became_ready(death * 20.0)
        assert isinstance(policy.ended(death * 20.0 + 3, permanent=False), Again)


def test_the_third_failed_load_is_the_last_and_the_next_one_too() -> None:
    policy = RestartPolicy()
    verdicts = [policy.ended(float(now), permanent=False) for now in (0, 5, 10, 400)]
    assert [type(verdict) for verdict in verdicts] == [Again, Again, GiveUp, GiveUp]


def test_a_good_start_in_between_clears_nothing() -> None:
    policy = RestartPolicy(dice=lambda: 0.5)
    policy.ended(0, permanent=False)
    policy.ended(10, permanent=False)
    policy.became_ready(20)
    assert delay_of(policy.ended(20 + 599, permanent=False)) == 4
    # The two failed loads still count.
    assert isinstance(policy.ended(700, permanent=False), GiveUp)


def test_ten_healthy_minutes_clear_everything() -> None:
    policy = RestartPolicy(dice=lambda: 0.5)
    policy.ended(0, permanent=False)
    policy.ended(10, permanent=False)
    policy.became_ready(20)
    assert delay_of(policy.ended(20 + 600, permanent=False)) == 1
    assert policy.deaths == 1


def test_a_permanent_cause_is_not_tried_again() -> None:
    assert RestartPolicy().ended(0, permanent=True) == GiveUp(300)


def test_an_operator_forgives() -> None:
    policy = RestartPolicy()
    for now in (0.0, 1.0, 2.0):
        policy.ended(now, permanent=False)
    policy.forgive()
    assert isinstance(policy.ended(3, permanent=False), Again)


# For real


async def becomes(condition: Callable[[], bool], *, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def restarts(fleet: Fleet, cause: str) -> float:
    return fleet.count("engine_restarts_total", model="a", cause=cause)


async def test_a_crashed_engine_comes_back_by_itself(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, new_policy=quick) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert backend.process.pid is not None
        os.kill(backend.process.pid, signal.SIGKILL)
        await becomes(lambda: len(fleet.starts()) == 2 and fleet.state("a") == "ready")
        assert await fleet.supervisor.ready(fleet.model("a")) is not backend


@pytest.mark.slow
async def test_an_engine_that_dies_over_and_over_is_given_up(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, new_policy=quick) as fleet:
        fleet.switch("a", die="exit1@0.4s", log_lines=["srv: the last words"])
        with pytest.raises(ModelFailed):
            while True:
                await fleet.supervisor.ready(fleet.model("a"))
                await asyncio.sleep(0.1)
        await becomes(lambda: fleet.state("a") == "failed")
        assert len(fleet.starts()) == 6
        assert restarts(fleet, "crash") == 5
        status = fleet.supervisor.status(fleet.model("a"))
        assert status.failure is not None
        assert any("the last words" in line for line in status.failure.log_tail)
        assert 0 < (status.next_try_seconds or 0) <= 0.5
        assert any("the last words" in line for line in fleet.supervisor.log_tail(fleet.model("a"), 50))
        # Half-open after a while: whoever asks then gets one more try, which now works.
        fleet.switch("a")
        await becomes(lambda: fleet.supervisor.status(fleet.model("a")).next_try_seconds == 0)
        await fleet.supervisor.ready(fleet.model("a"))
        assert len(fleet.starts()) == 7


async def test_a_load_that_fails_three_times_is_given_up_until_an_operator_asks(
    fake: EngineBinary, demo_model: Path
) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, new_policy=lambda: RestartPolicy(RestartRules(0.02))) as fleet:
        fleet.switch("a", die="exit1@load")
        with pytest.raises(ModelFailed) as failed:
            await fleet.supervisor.ready(fleet.model("a"))
        assert 280 <= (failed.value.retry_after_seconds or 0) <= 300
        assert len(fleet.starts()) == 3
        with pytest.raises(ModelFailed):
            await fleet.supervisor.ready(fleet.model("a"))
        assert len(fleet.starts()) == 3
        fleet.switch("a")
        fleet.supervisor.load(fleet.model("a"))
        await becomes(lambda: fleet.state("a") == "ready")
        assert fleet.supervisor.status(fleet.model("a")).failure is None


async def test_an_operator_ends_a_back_off(fake: EngineBinary, demo_model: Path) -> None:
    slow = RestartRules(first_delay=60)
    async with fleet_of(fake, demo_model, {"a": {}}, new_policy=lambda: RestartPolicy(slow)) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert backend.process.pid is not None
        os.kill(backend.process.pid, signal.SIGKILL)
        await becomes(lambda: fleet.state("a") == "starting")
        fleet.supervisor.load(fleet.model("a"))
        await becomes(lambda: fleet.state("a") == "ready", seconds=5)


async def test_an_engine_is_stopped_during_its_back_off(fake: EngineBinary, demo_model: Path) -> None:
    slow = RestartRules(first_delay=60)
    async with fleet_of(fake, demo_model, {"a": {}}, new_policy=lambda: RestartPolicy(slow)) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert backend.process.pid is not None
        os.kill(backend.process.pid, signal.SIGKILL)
        await becomes(lambda: fleet.state("a") == "starting")
        fleet.supervisor.unload(fleet.model("a"))
        await becomes(lambda: fleet.state("a") == "stopped", seconds=2)
        assert not any(is_alive(pid) for pid in fleet.pids())


@pytest.mark.slow
async def test_a_doomed_model_costs_less_than_one_percent_of_a_core(demo_model: Path, tmp_path: Path) -> None:
    """With real delays and a client that asks again as soon as it is allowed to, for a minute."""
    program = tmp_path / "llama-server"
    helpful = fake_engine_binary()
    program.write_text(f'#!/bin/sh\\ncase "$*" in *--alias*) exit 1;; esac\\nexec {helpful.path} "$@"\\n')
    program.chmod(0o755)
    doomed = EngineBinary((str(program),), "native", program, "x", 1, helpful.flags, "", helpful.valued_flags)
    async with fleet_of(doomed, demo_model, {"a": {}}) as fleet:
        loop = asyncio.get_running_loop()
        before, ends = _cpu_seconds(), loop.time() + 60
        while loop.time() < ends:
            try:
                await fleet.supervisor.ready(fleet.model("a"))
            except ModelFailed as failed:
                await asyncio.sleep(min(failed.retry_after_seconds or 1, max(0.0, ends - loop.time())))
        spent = _cpu_seconds() - before
    print(f"{spent:.2f} s of CPU in a minute")
    assert spent < 0.6


def _cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
