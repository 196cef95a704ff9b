"""Who gets a slot when: capacity, order, fairness, and nothing left behind by those who leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidValue, Overloaded
from app.metrics import Metrics
from app.scheduler import Lease, Scheduler
from tests.checklist import lines

MODEL = "m"


@dataclass(eq=False)
class Client:
    """One request: asks for slots, holds them until ``leave`` is set."""

    name: str
    key: str
    slots: int = 1
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    is_served: bool = False

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    def cancel(self) -> None:
        """The connection breaks."""
        assert self.task is not None
        self.task.cancel()


class House:
    """A scheduler with one model, and a record of who was served in which order."""

    def __init__(self, *, capacity: int = 1, max_queue: int = 1000) -> None:
        self.metrics = Metrics()
        self.scheduler = Scheduler(self.metrics)
        self.capacity = capacity
        self.max_queue = max_queue
        self.served: list[str] = []
        self.most_busy = 0
        self.clients: list[Client] = []

    def enter(self, key: str, *, slots: int = 1, name: str = "") -> Client:
        client = Client(name or f"{key}{sum(1 for other in self.clients if other.key == key)}", key, slots)
        self.clients.append(client)
        client.task = asyncio.create_task(self._visit(client))
        return client

    @asynccontextmanager
    async def lease(self, client: Client) -> AsyncIterator[Lease]:
        async with self.scheduler.lease(
            MODEL, key=client.key, capacity=self.capacity, max_queue=self.max_queue, slots=client.slots
        ) as lease:
            yield lease

    async def _visit(self, client: Client) -> None:
        async with self.lease(client):
            client.is_served = True
            self.served.append(client.name)
            self.most_busy = max(self.most_busy, self.busy)
            await client.leave.wait()

    async def drain(self) -> None:
        """Everybody who is served leaves, until nobody is left; fails at once when somebody is stuck."""
        while any(not client.is_over for client in self.clients):
            inside = [client for client in self.clients if client.is_served and not client.is_over]
            assert inside, f"stuck: {self.scheduler.waiting(MODEL)} wait, {self.busy} busy"
            for client in inside:
                client.leave.set()
            await turn()
        await asyncio.gather(*(client.task for client in self.clients if client.task), return_exceptions=True)

    @property
    def busy(self) -> int:
        return self.scheduler.in_flight(MODEL)

    @property
    def waiting(self) -> int:
        return self.scheduler.waiting(MODEL)

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"llama_gateway_{name}", {"model": MODEL, **labels})


async def turn() -> None:
    """Let everything that is ready run."""
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_free_slot_is_had_at_once() -> None:
    house = House(capacity=2)
    async with house.lease(Client("a", "k", slots=2)) as lease:
        assert (lease.model_id, lease.slots, house.busy) == (MODEL, 2, 2)
        assert 0 <= lease.waited_seconds < 1
    assert (house.busy, house.waiting) == (0, 0)


async def test_capacity_is_never_exceeded() -> None:
    house = House(capacity=3)
    for index in range(20):
        house.enter(f"key{index % 4}", slots=1 + index % 3)
    await turn()
    await house.drain()
    assert len(house.served) == 20
    assert house.most_busy <= 3
    assert (house.busy, house.waiting) == (0, 0)


async def test_models_have_queues_of_their_own() -> None:
    scheduler = Scheduler(Metrics())
    async with (
        scheduler.lease("a", key="k", capacity=1, max_queue=0),
        scheduler.lease("b", key="k", capacity=1, max_queue=0),
    ):
        assert (scheduler.in_flight("a"), scheduler.in_flight("b"), scheduler.in_flight("c")) == (1, 1, 0)
    assert scheduler.waiting("c") == 0


async def test_requests_of_one_key_keep_their_order() -> None:
    house = House()
    for _ in range(10):
        house.enter("k")
    await turn()
    await house.drain()
    assert house.served == [f"k{index}" for index in range(10)]


async def test_keys_take_turns() -> None:
    house = House()
    for _ in range(5):
        house.enter("flood")
    await turn()
    for key in ("x", "y", "x"):
        house.enter(key)
        await turn()
    await house.drain()
    assert house.served == ["flood0", "x0", "y0", "flood1", "x1", "flood2", "flood3", "flood4"]


async def test_a_freed_slot_goes_to_who_waits_not_to_who_comes() -> None:
    house = House()
    first, second = house.enter("a"), house.enter("b")
    await turn()
    first.leave.set()
    latecomer = house.enter("c")
    await turn()
    assert (second.is_served, latecomer.is_served) == (True, False)
    await house.drain()


@lines(51)
async def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    house = House(max_queue=2)
    for _ in range(3):
        house.enter("k")
    await turn()
    assert house.waiting == 2
    with pytest.raises(Overloaded, match="2 requests already wait") as refusal:
        async with house.lease(Client("late", "other")):
            pass
    assert (refusal.value.status, refusal.value.headers()["retry-after"]) == (429, "5")
    assert (house.busy, house.waiting) == (1, 2)
    await house.drain()
    assert (house.busy, house.waiting) == (0, 0)


async def test_without_a_queue_only_free_slots_are_given() -> None:
    house = House(capacity=1, max_queue=0)
    async with house.lease(Client("a", "k")):
        with pytest.raises(Overloaded):
            async with house.lease(Client("b", "k")):
                pass
    async with house.lease(Client("c", "k")):
        assert house.busy == 1


@lines(68)
async def test_more_slots_than_there_are_is_the_clients_fault() -> None:
    house = House(capacity=2)
    with pytest.raises(InvalidValue) as refusal:
        async with house.lease(Client("a", "k", slots=3)):
            pass
    assert refusal.value.param == "n"
    assert (house.busy, house.waiting) == (0, 0)


async def test_who_needs_several_slots_is_not_overtaken_for_ever() -> None:
    house = House(capacity=2)
    first = house.enter("a")
    await turn()
    house.enter("b", slots=2)
    small = house.enter("c")
    await turn()
    assert not small.is_served
    first.leave.set()
    await turn()
    assert house.served == ["a0", "b0"]
    await house.drain()
    assert house.served == ["a0", "b0", "c0"]


async def test_one_release_may_serve_several() -> None:
    house = House(capacity=3)
    first = house.enter("a", slots=3)
    await turn()
    for key in ("b", "c", "d"):
        house.enter(key)
    await turn()
    first.leave.set()
    await turn()
    assert house.busy == 3
    await house.drain()


# Leaving


async def test_leaving_while_served_frees_the_slot() -> None:
    house = House()
    first, second = house.enter("a"), house.enter("a")
    await turn()
    first.cancel()
    await turn()
    assert second.is_served
    await house.drain()
    assert (house.busy, house.waiting) == (0, 0)


async def test_a_failure_while_served_frees_the_slot() -> None:
    house = House()
    with pytest.raises(RuntimeError):
        async with house.lease(Client("a", "k")):
            raise RuntimeError
    assert house.busy == 0


async def test_leaving_before_the_first_step_takes_nothing() -> None:
    house = House()
    client = house.enter("a")
    client.cancel()
    await turn()
    assert (house.busy, house.waiting, house.served) == (0, 0, [])


async def test_leaving_while_waiting_takes_the_place_out() -> None:
    house = House()
    house.enter("a")
    waiters = [house.enter("a") for _ in range(3)]
    await turn()
    waiters[1].cancel()
    await turn()
    assert house.waiting == 2
    await house.drain()
    assert house.served == ["a0", "a1", "a3"]


async def test_leaving_in_the_turn_in_which_the_slot_is_granted_passes_it_on() -> None:
    house = House()
    first, second, third = (house.enter(key) for key in "abc")
    await turn()
    # The grant is in the future already, and the client's task has not run since.
    first.leave.set()
    await asyncio.sleep(0)
    assert house.busy == 1
    assert not second.is_served
    second.cancel()
    await turn()
    assert (second.is_served, third.is_served) == (False, True)
    await house.drain()
    assert (house.busy, house.waiting) == (0, 0)


async def test_a_client_that_left_just_before_the_grant_gets_none() -> None:
    house = House()
    first, second, third = (house.enter(key) for key in "abc")
    await turn()
    first.leave.set()
    second.cancel()
    await turn()
    assert (second.is_served, third.is_served) == (False, True)
    await house.drain()
    assert (house.busy, house.waiting) == (0, 0)


async def test_who_blocked_the_others_and_left_blocks_no_more() -> None:
    house = House(capacity=2)
    house.enter("a")
    await turn()
    big, _ = house.enter("b", slots=2), house.enter("c")
    await turn()
    assert house.served == ["a0"]
    big.cancel()
    await turn()
    assert house.served == ["a0", "c0"]
    await house.drain()


async def test_all_leave_at_once() -> None:
    house = House(capacity=2)
    clients = [house.enter(key) for key in "abcabcabc"]
    await turn()
    for client in clients:
        client.cancel()
    await turn()
    assert (house.busy, house.waiting) == (0, 0)
    assert all(client.is_over for client in clients)


async def test_more_capacity_is_used_by_those_who_wait() -> None:
    house = House(capacity=1)
    house.enter("a")
    waiter = house.enter("b")
    await turn()
    house.capacity = 3
    house.enter("c")
    await turn()
    assert waiter.is_served
    await house.drain()


async def test_who_can_never_be_served_any_more_does_not_block_the_others() -> None:
    """After a step down the engine may come back with fewer slots than somebody in the queue asked for."""
    house = House(capacity=2)
    first = house.enter("a", slots=2)
    await turn()
    big = house.enter("b", slots=2)
    await turn()
    house.capacity = 1
    small = house.enter("c")
    await turn()
    first.leave.set()
    await turn()
    assert small.is_served
    small.leave.set()
    await turn()
    assert big.task is not None
    assert isinstance(big.task.exception(), InvalidValue)
    assert (house.busy, house.waiting) == (0, 0)


async def test_the_gauges_follow() -> None:
    house = House(capacity=2)
    clients = [house.enter(key) for key in "abc"]
    await turn()
    assert (house.gauge("queue_depth"), house.busy) == (1, 2)
    assert (house.gauge("slots", state="busy"), house.gauge("slots", state="idle")) == (2, 0)
    clients[2].cancel()
    await turn()
    assert house.gauge("queue_depth") == 0
    await house.drain()
    assert (house.gauge("slots", state="busy"), house.gauge("slots", state="idle")) == (0, 2)
    assert house.metrics.of(MODEL).queue_wait.count == 2


# Anything at all

_STEP = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from("abc"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["leave", "cancel"]), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("turn"), st.integers(0, 3), st.just(0)),
)


async def _play(steps: list[tuple[str, str | int, int]]) -> None:
    house = House(capacity=3, max_queue=6)
    for what, which, slots in steps:
        if what == "enter":
            house.enter(str(which), slots=slots)
        elif what == "turn":
            for _ in range(int(which)):
                await asyncio.sleep(0)
        elif house.clients:
            client = house.clients[int(which) % len(house.clients)]
            client.leave.set() if what == "leave" else client.cancel()
        assert 0 <= house.busy <= 3
        assert 0 <= house.waiting <= 6
    await turn()
    await house.drain()
    assert (house.busy, house.waiting) == (0, 0)
    assert house.most_busy <= 3
    for key in "abc":
        order = [name for name in house.served if name.startswith(key)]
        assert order == sorted(order, key=lambda name: int(name[1:]))


@given(st.lists(_STEP, max_size=60))
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_any_sequence_leaves_nothing_behind(steps: list[tuple[str, str | int, int]]) -> None:
    asyncio.run(_play(steps))
