"""Who gets how much: a flood cannot drown a trickle, weights hold, promises are kept. All on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from app.errors import Overloaded, Unavailable
from app.metrics import Metrics
from app.scheduler import Demand, Rules, Scheduler, Urgency
from tests.virtual_time import run_virtually

MODEL = "m"
PROMPT_RATE, ANSWER_RATE = 1000.0, 20.0


class Service:
    """An engine of two slots that needs the time its tokens take."""

    def __init__(self, *, slots: int = 2, max_queue: int = 1000, rules: Rules | None = None) -> None:
        self.scheduler = Scheduler(Metrics())
        self.slots = slots
        self.max_queue = max_queue
        self.rules = rules or Rules()
        self.tokens: Counter[str] = Counter()
        self.order: list[str] = []

    async def ask(self, key: str, demand: Demand, *, answer_tokens: int | None = None, name: str = "") -> float:
        """Ask and be answered; the seconds that were waited."""
        answered = demand.answer_tokens if answer_tokens is None else answer_tokens
        async with self.scheduler.lease(
            MODEL, key=key, capacity=self.slots, max_queue=self.max_queue, demand=demand, rules=self.rules
        ) as lease:
            self.order.append(name or key)
            await asyncio.sleep(demand.prompt_tokens / PROMPT_RATE)
            lease.prefilled()
            await asyncio.sleep(answered / ANSWER_RATE)
            self.tokens[key] += demand.prompt_tokens + answered
            self.scheduler.observe(MODEL, prompt_tokens_per_second=PROMPT_RATE, answer_tokens_per_second=ANSWER_RATE)
            lease.used(prompt_tokens=demand.prompt_tokens, answer_tokens=answered)
            return lease.waited_seconds


def seconds(demand: Demand) -> float:
    return demand.prompt_tokens / PROMPT_RATE + demand.answer_tokens / ANSWER_RATE


@pytest.mark.parametrize(
    ("trickle", "pause_seconds"), [(Demand(500, 100), 6), (Demand(4000, 100), 45), (Demand(50, 10), 6)]
)
def test_a_flood_does_not_drown_a_trickle(trickle: Demand, pause_seconds: float) -> None:
    async def scenario() -> None:
        service, choose, flood = Service(), random.Random(1), Demand(500, 100)
        flooders = {asyncio.create_task(service.ask("flood", flood)) for _ in range(200)}
        waits = []
        for _ in range(60):
            await asyncio.sleep((0.5 + choose.random()) * pause_seconds)
            # 200 at all times.
            done = {task for task in flooders if task.done()}
            flooders = flooders - done | {asyncio.create_task(service.ask("flood", flood)) for _ in done}
            waits.append(await service.ask("trickle", trickle))
        # A slot becomes free after one service at the latest.
        assert sorted(waits)[int(len(waits) * 0.95)] <= 1.5 * seconds(flood)
        for task in flooders:
            task.cancel()
        await asyncio.gather(*flooders, return_exceptions=True)
        assert (service.scheduler.in_flight(MODEL), service.scheduler.waiting(MODEL)) == (0, 0)

    run_virtually(scenario())


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 1, "b": 3}, {"a": 1, "b": 2, "c": 5}])
@pytest.mark.parametrize("surplus", [1, 4])
@pytest.mark.parametrize("wasteful", ["a", "abc"])
def test_shares_follow_the_weights(weights: dict[str, int], surplus: int, wasteful: str) -> None:
    """Keys ask for answers of different lengths, and some use only a part of what they reserve."""

    async def scenario() -> None:
        service, choose = Service(), random.Random(2)

        async def keep_asking(key: str) -> None:
            part = surplus if key in wasteful else 1
            while True:
                answer = choose.randint(5, 25) * (2 if key == "b" else 1)
                await service.ask(key, Demand(0, answer * part, weight=weights[key]), answer_tokens=answer)

        clients = [asyncio.create_task(keep_asking(key)) for key in weights for _ in range(10)]
        await asyncio.sleep(60)
        before = Counter(service.tokens)
        await asyncio.sleep(60)
        total = sum((service.tokens - before).values())
        assert total >= 0.95 * 60 * ANSWER_RATE * service.slots
        for key, weight in weights.items():
            share = (service.tokens[key] - before[key]) / total
            assert share == pytest.approx(weight / sum(weights.values()), rel=0.1)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    run_virtually(scenario())


def test_idling_saves_nothing_up() -> None:
    async def scenario() -> None:
        service, demand = Service(slots=1), Demand(0, 20)
        busy = [asyncio.create_task(service.ask("busy", demand)) for _ in range(100)]
        await asyncio.sleep(50)
        late = [asyncio.create_task(service.ask("late", demand)) for _ in range(20)]
        await asyncio.sleep(20.5)
        assert sum(task.done() for task in late) in (9, 10, 11)
        for task in busy + late:
            task.cancel()
        await asyncio.gather(*busy, *late, return_exceptions=True)

    run_virtually(scenario())


def test_interactive_goes_before_batch_within_a_key_only() -> None:
    async def scenario() -> None:
        service, demand = Service(slots=1), Demand(0, 20)
        batch = replace(demand, urgency=Urgency.BATCH)
        first = asyncio.create_task(service.ask("a", demand))
        await asyncio.sleep(0)
        asked = [("a", batch, "a-batch-0"), ("a", batch, "a-batch-1"), ("b", batch, "b-batch"), ("a", demand, "a-now")]
        rest = []
        for key, wish, name in asked:
            rest.append(asyncio.create_task(service.ask(key, wish, name=name)))
            await asyncio.sleep(0)
        await asyncio.gather(first, *rest)
        assert service.order == ["a", "b-batch", "a-now", "a-batch-0", "a-batch-1"]

    run_virtually(scenario())


def test_one_long_prompt_at_a_time_is_read() -> None:
    async def scenario() -> None:
        service = Service(slots=3, rules=Rules(long_prompt_tokens=8000, long_prefills=1))
        long, short = Demand(8000, 200), Demand(10, 20)
        tasks = [asyncio.create_task(service.ask("a", long, name=f"long{index}")) for index in range(2)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(service.ask("a", short, name="short")))
        await asyncio.sleep(1)
        assert service.order == ["long0", "short"]
        await asyncio.sleep(7.5)
        # The first is read, though it is still being answered.
        assert service.order == ["long0", "short", "long1"]
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.sleep(1)
        assert await service.ask("a", long) == 0
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtually(scenario())


def test_a_long_one_that_leaves_lets_the_next_begin() -> None:
    async def scenario() -> None:
        service = Service(slots=2, rules=Rules(long_prompt_tokens=8000, long_prefills=1))
        first, second = (asyncio.create_task(service.ask("a", Demand(8000, 1))) for _ in range(2))
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.sleep(0.01)
        assert (service.scheduler.in_flight(MODEL), service.scheduler.waiting(MODEL)) == (1, 0)
        await second

    run_virtually(scenario())


def test_a_shared_pool_is_never_overbooked() -> None:
    async def scenario() -> None:
        service = Service(slots=8, rules=Rules(pool_tokens=1000))
        tasks = [asyncio.create_task(service.ask("a", Demand(300, 100))) for _ in range(6)]
        await asyncio.sleep(0.1)
        assert service.scheduler.in_flight(MODEL) == 2
        await asyncio.gather(*tasks)
        # What fits the model goes alone, whatever the pool's size is.
        await service.ask("a", Demand(900, 200))
        # What goes to the engine in parts never holds more than one of them.
        parts = [asyncio.create_task(service.ask("a", Demand(3000, 0, most_at_once=500))) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert (service.scheduler.in_flight(MODEL), service.scheduler.held_tokens(MODEL)) == (2, 1000)
        await asyncio.gather(*parts)
        assert service.scheduler.held_tokens(MODEL) == 0

    run_virtually(scenario())


def test_a_deadline_ends_the_wait() -> None:
    async def scenario() -> None:
        service = Service(slots=1)
        holder = asyncio.create_task(service.ask("a", Demand(0, 400)))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="within 5 s") as refusal:
            await service.ask("b", Demand(0, 20, deadline_seconds=5))
        assert (refusal.value.status, asyncio.get_running_loop().time()) == (503, 5)
        assert service.scheduler.waiting(MODEL) == 0
        await holder

    run_virtually(scenario())


def test_a_key_has_its_own_bound() -> None:
    async def scenario() -> None:
        service = Service(slots=1, rules=Rules(max_queue_per_key=2))
        tasks = [asyncio.create_task(service.ask("a", Demand(0, 20))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests of the key 'a'"):
            await service.ask("a", Demand(0, 20))
        tasks.append(asyncio.create_task(service.ask("b", Demand(0, 20))))
        await asyncio.gather(*tasks)

    run_virtually(scenario())


@pytest.mark.parametrize("max_queue", [4, 16])
def test_who_comes_back_when_told_to_is_served(max_queue: int) -> None:
    """Clients of one flood come back after exactly what Retry-After said; answers vary, as answers do."""

    async def scenario() -> None:
        service, choose = Service(max_queue=max_queue), random.Random(3)
        came_back: Counter[bool] = Counter()
        for _ in range(10):
            await service.ask("warm", Demand(200, 40), answer_tokens=20)

        async def client() -> None:
            answer, told = choose.randint(5, 40), False
            while True:
                try:
                    await service.ask("flood", Demand(200, 40), answer_tokens=answer)
                except Overloaded as refusal:
                    came_back[False] += told
                    told = True
                    await asyncio.sleep(int(refusal.headers()["retry-after"]))
                else:
                    came_back[True] += told
                    return

        for _ in range(4):
            await asyncio.gather(*(client() for _ in range(max_queue + 40)))
        assert came_back[True] >= 100
        assert came_back[True] / came_back.total() >= 0.95

    run_virtually(scenario())
