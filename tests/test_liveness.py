"""An engine that stands still is replaced, whatever it was doing, and nobody waits for it in vain."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.backends.liveness import Patience
from app.engine.binary import EngineBinary
from app.errors import EngineGone
from app.supervisor.restarts import RestartPolicy, RestartRules
from tests.fleet import Fleet, fake_engine_binary, fleet_of
from tests.gateway import is_alive

BODY = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true, "max_tokens": 1000}'
# The real numbers, sixty times faster.
QUICK = Patience(
    stall_seconds=1.2, silence_seconds=1.2, probe_interval_seconds=0.2, probe_timeout_seconds=0.2, missed_probes=3
)


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


def quick() -> RestartPolicy:
    return RestartPolicy(RestartRules(first_delay=0.01))


async def pid_of(fleet: Fleet) -> int:
    """The process of the model's engine, as soon as there is one."""
    async with asyncio.timeout(10):
        while not fleet.pids():
            await asyncio.sleep(0.01)
    return fleet.pids()[-1]


async def replaced(fleet: Fleet, pid: int, *, within: float) -> float:
    """The seconds until the model is served by another process and the old one is gone for good."""
    started = time.monotonic()
    async with asyncio.timeout(within):
        while True:
            backend = await fleet.supervisor.ready(fleet.model("a"))
            if backend.process.pid != pid and not is_alive(pid):
                break
            await asyncio.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return time.monotonic() - started


@pytest.mark.slow
async def test_stopped_while_it_loads(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, patience=QUICK, new_policy=quick) as fleet:
        fleet.switch("a", load_seconds=2)
        waiting = asyncio.create_task(fleet.supervisor.ready(fleet.model("a")))
        pid = await pid_of(fleet)
        os.kill(pid, signal.SIGSTOP)
        fleet.switch("a")
        await waiting
        await replaced(fleet, pid, within=20)
        assert fleet.count("engine_restarts_total", model="a", cause="hang") == 1


@pytest.mark.slow
async def test_stopped_while_it_is_idle(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, patience=QUICK, new_policy=quick) as fleet:
        await fleet.supervisor.ready(fleet.model("a"))
        pid = await pid_of(fleet)
        os.kill(pid, signal.SIGSTOP)
        await replaced(fleet, pid, within=20)


@pytest.mark.parametrize("moment", ["prefill", "decode"])
@pytest.mark.slow
async def test_stopped_while_it_answers(fake: EngineBinary, demo_model: Path, moment: str) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, patience=QUICK, new_policy=quick) as fleet:
        slow: dict[str, Any] = {"silence_seconds": 30} if moment == "prefill" else {"chunk_interval_seconds": 0.05}
        fleet.switch("a", chunks=1000, **slow)
        backend = await fleet.supervisor.ready(fleet.model("a"))
        pid = await pid_of(fleet)
        async with asyncio.timeout(10):
            with pytest.raises(EngineGone):
                async with backend.open(BODY) as reply:
                    if moment == "prefill":
                        os.kill(pid, signal.SIGSTOP)
                    while await reply.read():
                        os.kill(pid, signal.SIGSTOP)
        await replaced(fleet, pid, within=20)


@pytest.mark.slow
async def test_silent_although_healthy(fake: EngineBinary, demo_model: Path) -> None:
    """The inference thread hangs: ``/health`` answers, pings come, but no progress."""
    async with fleet_of(fake, demo_model, {"a": {}}, patience=QUICK, new_policy=quick) as fleet:
        fleet.switch("a", chunks=50, silence_seconds=30, silence_at=3)
        backend = await fleet.supervisor.ready(fleet.model("a"))
        pid = await pid_of(fleet)
        started = time.monotonic()
        with pytest.raises(EngineGone):
            async with backend.open(BODY) as reply:
                while await reply.read():
                    pass
        assert QUICK.silence_seconds <= time.monotonic() - started < 2 * QUICK.silence_seconds + 1
        await replaced(fleet, pid, within=20)


@pytest.mark.slow
async def test_a_slow_answer_and_a_slow_reader_are_no_hang(fake: EngineBinary, demo_model: Path) -> None:
    patience = Patience(silence_seconds=0.6, probe_interval_seconds=0.3, probe_timeout_seconds=0.3)
    async with fleet_of(fake, demo_model, {"a": {}}, patience=patience, new_policy=quick) as fleet:
        fleet.switch("a", chunks=6, chunk_interval_seconds=0.3)
        backend = await fleet.supervisor.ready(fleet.model("a"))
        async with backend.open(BODY) as reply:
            # Slower than the patience in all, with a sign of life in between.
            received = await reply.read_all()
        assert b"[DONE]" in received
        async with backend.open(BODY) as reply:
            while await reply.read():
                # The client takes its time; that is not the engine's fault.
                await asyncio.sleep(0.5)
        assert fleet.starts() == ["a"]


@pytest.mark.slow
async def test_a_flapping_health_is_no_hang(fake: EngineBinary, demo_model: Path) -> None:
    """An answer of 503 is an answer: what matters is whether it works."""
    async with fleet_of(fake, demo_model, {"a": {}}, patience=QUICK, new_policy=quick) as fleet:
        fleet.switch("a", health_flap_seconds=0.5)
        await fleet.supervisor.ready(fleet.model("a"))
        await asyncio.sleep(2.5)
        assert fleet.starts() == ["a"]


async def test_a_gateway_that_stood_still_itself_blames_nobody(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, patience=QUICK, new_policy=quick) as fleet:
        fleet.switch("a", chunks=20, chunk_interval_seconds=0.1)
        backend = await fleet.supervisor.ready(fleet.model("a"))
        async with backend.open(BODY) as reply:
            assert await reply.read()
            psutil.Process(await pid_of(fleet)).suspend()
            time.sleep(2)  # noqa: ASYNC251 - the very thing
            psutil.Process(await pid_of(fleet)).resume()
            while await reply.read():
                pass
        assert fleet.starts() == ["a"]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("prefill", marks=pytest.mark.slow),
        *(pytest.param(moment, marks=pytest.mark.long) for moment in ("load", "idle", "decode")),
    ],
)
async def test_with_the_real_numbers_it_takes_at_most_ninety_seconds(
    fake: EngineBinary, demo_model: Path, moment: str
) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}) as fleet:
        silence_seconds = 200 if moment == "prefill" else 0
        fleet.switch(
            "a",
            load_seconds=5 if moment == "load" else 0,
            chunks=10_000,
            chunk_interval_seconds=0.05,
            silence_seconds=silence_seconds,
        )
        started = asyncio.create_task(fleet.supervisor.ready(fleet.model("a")))
        if moment == "load":
            pid = await pid_of(fleet)
            os.kill(pid, signal.SIGSTOP)
            stopped_at = time.monotonic()
        else:
            backend = await started
            pid = await pid_of(fleet)
            stopped_at = time.monotonic()
            if moment == "idle":
                os.kill(pid, signal.SIGSTOP)
            else:
                with pytest.raises(EngineGone):
                    async with backend.open(BODY) as reply:
                        if moment == "prefill":
                            os.kill(pid, signal.SIGSTOP)
                        while await reply.read():
                            os.kill(pid, signal.SIGSTOP)
        fleet.switch("a")
        await started
        await replaced(fleet, pid, within=90)
        took = time.monotonic() - stopped_at
        print(f"{moment}: replaced after {took:.1f} s")
        assert took <= 90
