"""Models that start on demand, once, share the machine by turns, and come and go as configured."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from app.engine.binary import EngineBinary
from app.errors import ModelFailed, ModelLoading
from tests.checklist import lines
from tests.fleet import ONE_MODEL, Fleet, fake_engine_binary, fleet_of
from tests.gateway import is_alive


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


async def state_becomes(fleet: Fleet, name: str, state: str, *, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while fleet.state(name) != state:
            await asyncio.sleep(0.01)


@lines(112)
async def test_one_load_however_many_ask_by_whatever_name(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {"aliases": ["x", "y"]}}) as fleet:
        names = ["a", "x", "y"] * 20
        backends = await asyncio.gather(*(fleet.supervisor.ready(fleet.model(name)) for name in names))
        assert len(set(map(id, backends))) == 1
        assert fleet.starts() == ["a"]
        assert fleet.count("model_state", model="a", state="ready") == 1


@lines(112)
@pytest.mark.slow
async def test_who_waits_too_long_is_told_how_long_it_will_take(fake: EngineBinary, demo_model: Path) -> None:
    # Long enough for the load to begin on a busy machine: one that nobody waits for does not.
    async with fleet_of(fake, demo_model, {"a": {}}, load_wait_seconds=1.0) as fleet:
        fleet.switch("a", load_seconds=1.5)
        model = fleet.model("a")
        with pytest.raises(ModelLoading) as loading:
            await fleet.supervisor.ready(model)
        assert 1 <= (loading.value.retry_after_seconds or 0) <= 60
        assert int(loading.value.headers()["retry-after"]) >= 1
        # The load goes on without them, and the next one finds it ready.
        await state_becomes(fleet, "a", "ready")
        await fleet.supervisor.ready(model)
        assert fleet.starts() == ["a"]
        # Now that a load has been seen, the answer is its length.
        load_seconds = fleet.supervisor.status(model).load_seconds or 0.0
        fleet.supervisor.unload(model)
        await state_becomes(fleet, "a", "stopped")
        with pytest.raises(ModelLoading) as again:
            await fleet.supervisor.ready(model)
        assert 1 <= (again.value.retry_after_seconds or 0) <= max(2.0, load_seconds)


async def test_an_idle_model_makes_room(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}, "b": {}}, memory={"ram_limit": ONE_MODEL}) as fleet:
        first = await fleet.supervisor.ready(fleet.model("a"))
        pid = first.process.pid
        assert pid is not None
        await fleet.supervisor.ready(fleet.model("b"))
        assert (fleet.state("a"), fleet.state("b")) == ("stopped", "ready")
        assert not is_alive(pid)
        assert fleet.count("evictions_total", model="a") == 1
        # The numbers say who holds memory now.
        exposed = fleet.metrics.expose().decode()
        assert 'model_memory_planned_bytes{device="host",model="b"' in exposed
        assert 'model_memory_planned_bytes{device="host",model="a"' not in exposed


async def test_what_fits_side_by_side_stays(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}, "b": {}}, memory={"ram_limit": "8GiB"}) as fleet:
        await asyncio.gather(*(fleet.supervisor.ready(fleet.model(name)) for name in "ab"))
        assert (fleet.state("a"), fleet.state("b")) == ("ready", "ready")
        assert fleet.count("evictions_total", model="a") == 0


async def test_a_model_in_use_is_drained_before_it_makes_room(fake: EngineBinary, demo_model: Path) -> None:
    memory = {"ram_limit": ONE_MODEL, "max_swap_wait": "300ms"}
    async with fleet_of(fake, demo_model, {"a": {}, "b": {}}, memory=memory) as fleet:
        a, b = fleet.model("a"), fleet.model("b")
        async with fleet.supervisor.use(a) as backend:
            other = asyncio.create_task(fleet.supervisor.ready(b))
            await asyncio.sleep(0.6)
            # Its bound has passed, so that new requests for a wait outside; the one inside is left alone.
            latecomer = asyncio.create_task(fleet.supervisor.ready(a))
            await asyncio.sleep(0.1)
            assert backend.is_ready
            assert not other.done()
            assert not latecomer.done()
        await other
        assert fleet.state("b") == "ready"
        # Then a's turn comes again.
        await latecomer
        assert fleet.starts() == ["a", "b", "a"]


async def test_who_no_longer_wants_the_room_does_not_take_it(fake: EngineBinary, demo_model: Path) -> None:
    memory = {"ram_limit": ONE_MODEL, "max_swap_wait": "100ms"}
    async with fleet_of(fake, demo_model, {"a": {}, "b": {}}, memory=memory) as fleet:
        a, b = fleet.model("a"), fleet.model("b")
        async with fleet.supervisor.use(a):
            other = asyncio.create_task(fleet.supervisor.ready(b))
            await asyncio.sleep(0.4)
            other.cancel()
            await state_becomes(fleet, "b", "stopped")
            # The door of a is open again.
            async with asyncio.timeout(1):
                await fleet.supervisor.ready(a)
        assert fleet.starts() == ["a"]


async def test_a_pinned_model_stays(fake: EngineBinary, demo_model: Path) -> None:
    models = {"a": {"pin": True, "idle_unload": "100ms"}, "b": {}}
    async with fleet_of(fake, demo_model, models, memory={"ram_limit": ONE_MODEL}) as fleet:
        await fleet.supervisor.ready(fleet.model("a"))
        with pytest.raises(ModelFailed, match="does not fit"):
            await fleet.supervisor.ready(fleet.model("b"))
        assert (fleet.state("a"), fleet.state("b")) == ("ready", "failed")


async def test_an_idle_model_is_unloaded_and_comes_back(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {"idle_unload": "200ms"}}) as fleet:
        a = fleet.model("a")
        async with fleet.supervisor.use(a):
            await asyncio.sleep(0.5)
            assert fleet.state("a") == "ready"
        await state_becomes(fleet, "a", "stopped")
        await fleet.supervisor.ready(a)
        assert fleet.starts() == ["a", "a"]


@pytest.mark.slow
async def test_a_request_at_the_very_moment_of_unloading_is_served(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {"idle_unload": "60ms"}}) as fleet:
        a = fleet.model("a")
        for offset_ms in range(52, 68, 2):
            async with fleet.supervisor.use(a) as backend:
                assert backend.is_ready
            await asyncio.sleep(offset_ms / 1000)
        async with asyncio.timeout(5), fleet.supervisor.use(a) as backend:
            assert backend.is_ready


async def test_preloaded_and_default_models(fake: EngineBinary, demo_model: Path) -> None:
    models = {"a": {}, "b": {"idle_unload": "200ms"}}
    options = {"memory": {"ram_limit": ONE_MODEL}, "sections": {"default_model": "a"}}
    async with fleet_of(fake, demo_model, models, **options) as fleet:
        fleet.supervisor.start()
        await state_becomes(fleet, "a", "ready")
        await fleet.supervisor.ready(fleet.model("b"))
        assert fleet.state("a") == "stopped"
        # b goes when idle; a comes back by itself.
        await state_becomes(fleet, "a", "ready")
        assert fleet.starts() == ["a", "b", "a"]


async def test_a_preload_stops_nobody(fake: EngineBinary, demo_model: Path) -> None:
    models = {"a": {"preload": True}, "b": {"preload": True}}
    async with fleet_of(fake, demo_model, models, memory={"ram_limit": ONE_MODEL}) as fleet:
        fleet.supervisor.start()
        await state_becomes(fleet, "a", "ready")
        await state_becomes(fleet, "b", "stopped")
        await fleet.supervisor.ready(fleet.model("b"))
        assert fleet.starts() == ["a", "b"]


async def interleaved(fleet: Fleet, *, in_order: bool) -> tuple[int, float, float]:
    """20 requests of two users to two models: loads, the longest wait, and seconds in all."""
    waits: list[float] = []
    arrival = asyncio.Lock()
    started = time.monotonic()

    async def user(name: str) -> None:
        for _ in range(10):
            asked = time.monotonic()
            async with arrival if in_order else nullcontext(), fleet.supervisor.use(fleet.model(name)):
                waits.append(time.monotonic() - asked)
                await asyncio.sleep(0.05)

    await asyncio.gather(user("a"), user("b"))
    return len(fleet.starts()), max(waits), time.monotonic() - started


async def test_two_users_of_two_models_do_not_thrash(fake: EngineBinary, demo_model: Path) -> None:
    fair = {"ram_limit": ONE_MODEL, "min_residency": "2s", "max_swap_wait": "2s"}
    async with fleet_of(fake, demo_model, {"a": {}, "b": {}}, memory=fair) as fleet:
        loads, wait, seconds = await interleaved(fleet, in_order=False)
        load_seconds = max(status.load_seconds or 0 for status in fleet.supervisor)
    print(f"by turns: {loads} loads of {load_seconds:.1f} s, longest wait {wait:.2f} s, {seconds:.1f} s in all")
    assert loads <= 4
    # The other's bound and its last answers, then the load; or two of them, at the start.
    assert wait < 3 + 2 * max(1.0, load_seconds)


@pytest.mark.slow
async def test_first_come_first_served_does(fake: EngineBinary, demo_model: Path) -> None:
    """What the test above is measured against."""
    async with fleet_of(fake, demo_model, {"a": {}, "b": {}}, memory={"ram_limit": ONE_MODEL}) as fleet:
        loads, wait, seconds = await interleaved(fleet, in_order=True)
    print(f"in order: {loads} loads, longest wait {wait:.2f} s, {seconds:.1f} s in all")
    assert loads == 20
