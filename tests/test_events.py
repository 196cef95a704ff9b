"""The history of what happened: bounded, in order, and never held up by who watches."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from app.events import EventKind, EventLog, FellBehind
from app.supervisor.restarts import RestartPolicy, RestartRules
from tests.fleet import ONE_MODEL, fake_engine_binary, fleet_of


def log_of(count: int, **options: int) -> EventLog:
    log = EventLog(**options)
    for number in range(count):
        log.record(EventKind.LOAD, f"event {number + 1}", model="a")
    return log


def test_the_history_is_bounded_and_in_order() -> None:
    log = log_of(30, kept=10)
    assert [event.number for event in log.latest(100)] == list(range(21, 31))
    assert [event.number for event in log.latest(3)] == [28, 29, 30]
    assert [event.number for event in log.latest(3, after=29)] == [30]
    assert log.latest(3, after=30) == []


def test_the_last_event_of_a_model_outlives_the_history_until_the_model_goes() -> None:
    log = EventLog(kept=2)
    log.record(EventKind.EVICTION, "gone", model="quiet")
    for _ in range(5):
        log.record(EventKind.LOAD, "here", model="busy")
    last = log.last_of("quiet")
    assert last is not None
    assert last.message == "gone"
    assert log.last_of("never seen") is None
    log.forget_model("quiet")
    assert log.last_of("quiet") is None


def test_only_operators_see_details_and_nobody_sees_keys() -> None:
    event = EventLog().record(
        EventKind.FAILED, "It failed.", detail="/srv/m.gguf with Bearer abcdefghijklmnop", seconds=1 / 3
    )
    assert "detail" not in event.document(for_operator=False)
    document = event.document(for_operator=True)
    assert document["detail"] == "/srv/m.gguf with Bearer [redacted]"
    assert document["seconds"] == 0.333
    assert abs(document["at"] - time.time()) < 60


async def test_a_watcher_sees_what_comes_and_a_slow_one_is_let_go() -> None:
    log = EventLog(behind=3)
    with log.watch() as quick, log.watch() as slow:
        for number in range(5):
            log.record(EventKind.LOAD, str(number))
            assert (await quick.next()).message == str(number)
        assert [(await slow.next()).message for _ in range(3)] == ["0", "1", "2"]
        with pytest.raises(FellBehind):
            await slow.next()
        waiting = asyncio.create_task(quick.next())
        await asyncio.sleep(0)
        log.record(EventKind.RELOAD, "late")
        assert (await waiting).message == "late"


async def test_who_stops_watching_is_forgotten() -> None:
    log = EventLog(behind=1)
    with log.watch() as watch:
        pass
    log.record(EventKind.LOAD, "unseen")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await watch.next()


async def test_loads_evictions_restarts_and_failures_are_told(demo_model: Path) -> None:
    log = EventLog()
    async with fleet_of(
        fake_engine_binary(),
        demo_model,
        {"a": {}, "b": {}},
        memory={"ram_limit": ONE_MODEL},
        events=log,
        new_policy=lambda: RestartPolicy(RestartRules(first_delay=0.01)),
    ) as fleet:
        await fleet.supervisor.ready(fleet.model("a"))
        fleet.switch("b", die="exit1@load")
        with log.watch() as watch:
            fleet.supervisor.load(fleet.model("b"))
            while (await watch.next()).kind is not EventKind.FAILED:
                pass
        loaded, evicted, *restarts, failed = log.latest(10)
        assert (loaded.kind, loaded.model, (loaded.seconds or 0) > 0) == (EventKind.LOAD, "a", True)
        assert (evicted.kind, evicted.model, evicted.cause) == (EventKind.EVICTION, "a", "memory")
        # Whose room it was is for operators alone.
        assert evicted.message == "Another model needed the room."
        assert evicted.detail == "It was b."
        assert [(event.kind, event.model, event.cause) for event in restarts] == [
            (EventKind.RESTART, "b", "crash"),
            (EventKind.RESTART, "b", "crash"),
        ]
        assert (failed.model, failed.cause) == ("b", "crash")
        assert failed.seconds == pytest.approx(300, rel=0.1)
        assert fleet.count("evictions_total", model="a") == 1
        assert fleet.count("engine_restarts_total", model="b", cause="crash") == 2


async def test_an_unload_says_who_wanted_it(demo_model: Path) -> None:
    log = EventLog()
    async with fleet_of(fake_engine_binary(), demo_model, {"a": {"idle_unload": "0.2s"}}, events=log) as fleet:
        with log.watch() as watch:
            await fleet.supervisor.ready(fleet.model("a"))
            assert (await watch.next()).kind is EventKind.LOAD
            assert (await watch.next()).cause == "idle"
            async with fleet.supervisor.use(fleet.model("a")):
                await watch.next()
                fleet.supervisor.unload(fleet.model("a"))
                assert (await watch.next()).cause == "operator"
