"""Load, unload, request, leave, crash, hang, evict, pin, reload and drain in any order, on virtual time.

At most one live engine per unit of configuration, the memory plan never exceeded, every request ends in exactly one
outcome, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from app.backends import LocalBackend
from app.config import ModelCatalog, ModelConfig, Settings
from app.engine.binary import EngineBinary
from app.engine.process import EngineDied, EngineExit, State
from app.engine.report import Cause, MeasuredMemory
from app.errors import GatewayError
from app.hardware import Machine
from app.metrics import Metrics
from app.offload import OffloadPlan
from app.offload.host import PROCESS_BYTES
from app.supervisor import Supervisor
from tests.gguf_writer import write
from tests.shapes import dense
from tests.virtual_time import SpinError, VirtualLoop, run_virtually

MIB = 1 << 20
NAMES = ("a", "b", "c", "d")
# Two of the models, not three.
RAM_LIMIT_MIB = 1700
LOAD_SECONDS = 7.0
HANG_SECONDS = 75.0


class Loop(VirtualLoop):
    """Work for threads is done in this one; who waits for it goes on in the loop's next pass, never in the same."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(work)
        return future


class World:
    """Everything that the engines share: who is alive, what they do next, who else takes memory."""

    def __init__(self) -> None:
        self.live: list[SimulatedEngine] = []
        self.next_start: Counter[tuple[str, str]] = Counter()
        self.ram_mib = 64_000
        self.pid = 0

    def probe(self) -> Machine:
        return Machine((), 64_000 * MIB, self.ram_mib * MIB, 2)

    def held_bytes(self) -> int:
        return sum(PROCESS_BYTES + engine.plan.memory.host.total_bytes for engine in self.live)

    def take(self, model: str, kind: str) -> bool:
        """Whether the next start of this model is to go wrong in this way."""
        if self.next_start[model, kind] == 0:
            return False
        self.next_start[model, kind] -= 1
        return True

    def check(self) -> None:
        alive = Counter((engine.model.id, engine.model.extra_args) for engine in self.live)
        assert all(count == 1 for count in alive.values()), f"two engines of one unit: {alive}"
        assert self.held_bytes() <= RAM_LIMIT_MIB * MIB, f"{self.held_bytes() / MIB:.0f} MiB are promised"


class SimulatedEngine:
    """Stands where a LocalBackend would, with the same timing and none of the bytes."""

    def __init__(self, world: World, model: ModelConfig, plan: OffloadPlan) -> None:
        self.world, self.model, self.plan = world, model, plan
        self.slots = model.parallel
        self.counter = SimpleNamespace(context_tokens=512)
        self.measured = MeasuredMemory()
        world.pid += 1
        self.process = SimpleNamespace(
            pid=world.pid,
            spec=SimpleNamespace(argv=("engine",)),
            log_tail=lambda count: ["a line"],
            anonymous_bytes=lambda: 0,
        )
        self.is_ready = False
        self.exit: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.world.live.append(self)
        self.world.check()
        if self.world.take(self.model.id, "stall"):
            await asyncio.sleep(HANG_SECONDS)
            self.end(Cause.HANG)
        await asyncio.wait([self.exit], timeout=LOAD_SECONDS)
        if self.world.take(self.model.id, "die"):
            self.end(Cause.CRASH)
        if self.world.take(self.model.id, "refuse"):
            self.end(Cause.BAD_FLAG)
        if self.exit.done():
            raise EngineDied(self.exit.result())
        self.is_ready = True

    async def wait_exit(self) -> EngineExit:
        return await asyncio.shield(self.exit)

    async def close(self) -> None:
        self.is_ready = False
        if self in self.world.live:
            # From TERM to the end of the process.
            await asyncio.sleep(0.3)
            self.end(Cause.ASKED)

    def hang(self) -> None:
        asyncio.get_running_loop().call_later(HANG_SECONDS, self.end, Cause.HANG)

    def end(self, cause: Cause) -> None:
        self.is_ready = False
        if self in self.world.live:
            self.world.live.remove(self)
        if not self.exit.done():
            phase = State.READY if self.is_ready else State.STARTING
            self.exit.set_result(EngineExit(1, cause, phase, ("its last line",)))


class FleetMachine(RuleBasedStateMachine):
    """``outcomes`` has one entry for each request that was made."""

    file: Path

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.world = World()
        self.entries: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
        self.requests: list[asyncio.Task[None]] = []
        self.outcomes: list[tuple[int, str]] = []
        self.configurations = 0
        self.supervisor: Supervisor

    @initialize()
    def open(self) -> None:
        async def build() -> Supervisor:
            catalog = self.catalog()
            return Supervisor(
                catalog,
                engine=EngineBinary(("engine",), "scripted", Path(), "1", None, frozenset(), "it is scripted"),
                memory=self.settings.memory,
                run_dir=Path("/nonexistent"),
                metrics=Metrics(),
                environment={},
                probe=self.world.probe,
                make_backend=lambda model, plan: cast(LocalBackend, SimulatedEngine(self.world, model, plan)),
            )

        self.supervisor = self.loop.run_until_complete(build())

    def catalog(self) -> ModelCatalog:
        default = "a" if "a" in self.entries else None
        self.settings = Settings.model_validate(
            {
                "memory": {"ram_reserve": 0, "ram_limit": f"{RAM_LIMIT_MIB}MiB"},
                "models": {name: {"path": self.file, "context": 512} | fields for name, fields in self.entries.items()},
                "default_model": default,
            }
        )
        return ModelCatalog(self.settings)

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    # What clients do

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([0.1, 2.0, 40.0]))
    def ask(self, name: str, seconds: float) -> None:
        if name not in self.entries:
            return
        model, number = self.catalog().resolve(name), len(self.requests)
        self.requests.append(self.loop.create_task(self.request(number, model, seconds)))
        self.run(0)

    async def request(self, number: int, model: ModelConfig, seconds: float) -> None:
        outcome = "left"
        try:
            async with self.supervisor.use(model) as backend:
                engine = cast(SimulatedEngine, backend)
                assert engine.is_ready
                assert engine in self.world.live
                await asyncio.wait([engine.exit], timeout=seconds)
                outcome = "broken off" if engine.exit.done() else "ok"
                # Whoever is inside is never stopped for another model, nor for being idle.
                assert not engine.exit.done() or engine.exit.result().cause is not Cause.ASKED or self.is_closing
        except GatewayError as error:
            outcome = type(error).__name__
        finally:
            self.outcomes.append((number, outcome))

    is_closing = False

    @rule(choice=st.integers(0, 1 << 16))
    def leave(self, choice: int) -> None:
        pending = [request for request in self.requests if not request.done()]
        if pending:
            pending[choice % len(pending)].cancel()
            self.run(0)

    # What goes wrong

    @rule(choice=st.integers(0, 1 << 16), cause=st.sampled_from([Cause.CRASH, Cause.KILLED_FOR_MEMORY]))
    def crash(self, choice: int, cause: Cause) -> None:
        if self.world.live:
            self.world.live[choice % len(self.world.live)].end(cause)
            self.run(0)

    @rule(choice=st.integers(0, 1 << 16))
    def hang(self, choice: int) -> None:
        if self.world.live:
            engine = self.world.live[choice % len(self.world.live)]
            self.loop.call_later(HANG_SECONDS, engine.end, Cause.HANG)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(["die", "refuse", "stall"]), times=st.integers(1, 4))
    def spoil(self, name: str, kind: str, times: int) -> None:
        self.world.next_start[name, kind] = times

    @rule(ram_mib=st.sampled_from([200, 700, 64_000]))
    def another_program(self, ram_mib: int) -> None:
        self.world.ram_mib = ram_mib

    # What operators do

    @rule(name=st.sampled_from(NAMES), load=st.booleans())
    def operate(self, name: str, load: bool) -> None:
        if name in self.entries:
            model = self.catalog().resolve(name)
            self.loop.call_soon(self.supervisor.load if load else self.supervisor.unload, model)
            self.run(0)

    @rule(name=st.sampled_from(NAMES), pin=st.booleans(), idle=st.sampled_from(["never", "5s", "2m"]))
    def adjust(self, name: str, pin: bool, idle: str) -> None:
        if name in self.entries:
            self.entries[name] |= {"pin": pin, "idle_unload": idle}
            self.apply()

    @rule(name=st.sampled_from(NAMES))
    def change(self, name: str) -> None:
        self.configurations += 1
        self.entries.setdefault(name, {})
        self.entries[name] |= {"extra_args": ["--seed", str(self.configurations)]}
        self.apply()

    @rule(name=st.sampled_from(NAMES[1:]))
    def remove(self, name: str) -> None:
        if self.entries.pop(name, None) is not None:
            self.apply()

    def apply(self) -> None:
        catalog = self.catalog()
        self.loop.run_until_complete(self.supervisor.apply(catalog, self.settings.memory))

    @rule(seconds=st.sampled_from([0.01, 0.4, 3.0, 8.0, 25.0, 80.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.run(seconds)

    # What always holds

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        self.world.check()
        numbers = [number for number, _ in self.outcomes]
        assert len(numbers) == len(set(numbers)), "a request ended twice"
        for request in self.requests:
            if request.done() and not request.cancelled():
                request.result()

    def teardown(self) -> None:
        try:
            if hasattr(self, "supervisor"):
                self.finish()
        finally:
            self.loop.close()

    def finish(self) -> None:
        """All waits end, every model can be had again, and closing leaves nothing."""
        self.world.ram_mib = 64_000
        self.world.next_start.clear()
        for entry in self.entries.values():
            entry["pin"] = False
        self.apply()
        self.run(2000)
        assert all(request.done() for request in self.requests), "a request waits for ever"
        for name in self.entries:
            self.ask(name, 0.1)
            self.run(400)
            assert self.outcomes[-1] == (len(self.requests) - 1, "ok"), self.outcomes[-1]
        # Whoever is idle goes, unless it is the one that comes back.
        for entry in self.entries.values():
            entry["idle_unload"] = "5s"
        self.apply()
        self.run(100)
        assert {engine.model.id for engine in self.world.live} <= {"a"}, "an idle engine was forgotten"
        for name in self.entries:
            self.ask(name, 40.0)
        self.run(15)
        self.is_closing = True
        self.loop.run_until_complete(self.supervisor.close())
        self.run(1)
        assert len(self.outcomes) == len(self.requests) == len({number for number, _ in self.outcomes})
        assert self.world.live == []
        assert asyncio.all_tasks(self.loop) == set()


@pytest.fixture(scope="module")
def machine() -> Iterator[type[FleetMachine]]:
    with tempfile.TemporaryDirectory(prefix="lg-") as folder:
        file = write(Path(folder) / "tiny.gguf", dense(layers=2, embedding=256, heads=4, kv_heads=4, vocabulary=512))
        yield type("Machine", (FleetMachine,), {"file": file})


def _settings(seeds: int) -> settings:
    return settings(
        max_examples=seeds,
        stateful_step_count=40,
        deadline=None,
        database=None,
        # The same histories every time: a failure can be looked at, and a run says something about the change in hand.
        derandomize=True,
        # The history that failed is told as it is: to shorten one takes longer than a test may.
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def test_sixty_histories(machine: type[FleetMachine]) -> None:
    run_state_machine_as_test(machine, settings=_settings(60))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_histories(machine: type[FleetMachine]) -> None:
    run_state_machine_as_test(machine, settings=_settings(2000))


def test_one_who_leaves_soon_and_one_who_answers_for_long_both_make_room(machine: type[FleetMachine]) -> None:
    """The wait for the second was once a spin, since the first had ended and ended each wait at once."""
    history = machine()
    history.open()
    for name in "abc":
        history.change(name)
    history.ask("a", 40.0)
    history.wait(8.0)
    history.ask("b", 0.1)
    history.wait(8.0)
    history.another_program(700)
    history.wait(8.0)
    history.ask("c", 0.1)
    history.wait(60.0)
    assert sorted(history.outcomes) == [(0, "ok"), (1, "ok"), (2, "ok")]
    history.teardown()


def test_one_who_is_being_replaced_keeps_its_settings(machine: type[FleetMachine]) -> None:
    """It once took over those of its successor, crashed, and came back as a second engine of the same settings."""
    history = machine()
    history.open()
    history.ask("a", 0.1)
    history.wait(8.0)
    history.change("a")
    history.crash(0, Cause.CRASH)
    history.adjust("a", pin=True, idle="never")
    history.wait(25.0)
    history.nothing_is_promised_twice()
    history.teardown()


def test_a_spin_is_a_failure_that_names_its_place() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SpinError, match=r"no time passes at 0\.000 s:(.|\n)*spin:\d+ > sleep:\d+"):
        run_virtually(spin())
