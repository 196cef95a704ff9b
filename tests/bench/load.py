"""The load generator: a process of its own that puts the three loads on one address and prints what it saw as JSON.

`python -m tests.bench.load '{"port": …, …}'` with the fields of `Load`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import uvloop

from .client import BadAnswer, Client, Meter, Reply, connect, render_request, text_of
from .processes import cpu_seconds, resident_bytes

EVENTS_BESIDE_CONTENT = 3  # role, finish, [DONE]


@dataclass(frozen=True, slots=True)
class Load:
    """What to put on which address; the processes whose CPU is read."""

    port: int
    model: str
    proxy_pids: Sequence[int]
    engine_pids: Sequence[int]
    headers: Mapping[str, str] = field(default_factory=dict)
    streams: int = 64
    rate: float = 50.0
    seconds: float = 12.0
    bursts: int = 10
    requests: int = 2000
    connections: int = 8
    idle_seconds: float = 0.0
    rewrites: bool = False  # the proxy makes events of its own: their number is not checked

    def tokens_of_a_stream(self) -> int:
        """So many that it still runs when the window ends."""
        return round((self.seconds + 2) * self.rate) + (2 if self.rate < 1 else 0)

    def request(self, *, stream: bool, max_tokens: int) -> bytes:
        messages = [{"role": "user", "content": "Why is the sky blue? Answer in one short paragraph."}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "stream": stream}
        return render_request(body, self.headers)


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU seconds of everybody, and the events so far, at one moment."""

    at: float
    proxy: float
    engine: float
    generator: float
    events: int

    @classmethod
    def take(cls, load: Load, meter: Meter) -> Sample:
        proxy, engine = cpu_seconds(load.proxy_pids), cpu_seconds(load.engine_pids)
        return cls(time.monotonic(), proxy, engine, time.process_time(), meter.events)


async def open_stream(load: Load, meter: Meter, *, max_tokens: int) -> Reply:
    """One stream on a connection of its own; the clock runs from before the connect."""
    sent_at = time.monotonic()
    client = await connect(load.port, meter)
    try:
        return await client.request(load.request(stream=True, max_tokens=max_tokens), sent_at=sent_at)
    finally:
        client.close()


async def measure_bursts(load: Load) -> dict[str, object]:
    """All streams at once, several times: seconds from the connect to the first event."""
    seconds: list[float] = []
    for _ in range(load.bursts):
        replies = await asyncio.gather(*(open_stream(load, Meter(), max_tokens=2) for _ in range(load.streams)))
        check_streams(load, replies, max_tokens=2)
        seconds += [reply.first_at - reply.sent_at for reply in replies]
    return {"first_token_seconds": seconds}


async def measure_streams(load: Load) -> dict[str, object]:
    """Long streams side by side; the CPU of a window in which all of them run."""
    meter = Meter()
    max_tokens = load.tokens_of_a_stream()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(open_stream(load, meter, max_tokens=max_tokens)) for _ in range(load.streams)]
        await asyncio.sleep(1)
        before = Sample.take(load, meter)
        await asyncio.sleep(load.seconds)
        after = Sample.take(load, meter)
        resident = resident_bytes(load.proxy_pids)
    replies = [task.result() for task in tasks]
    check_streams(load, replies, max_tokens=max_tokens)
    wall = after.at - before.at
    events = after.events - before.events
    return {
        "events": events,
        "events_per_second": events / wall,
        "cpu_seconds_per_event": (after.proxy - before.proxy) / events,
        "engine_load": (after.engine - before.engine) / wall,
        "generator_load": (after.generator - before.generator) / wall,
        "resident_bytes": resident,
        "event_bytes": round(len(replies[0].body()) / (max_tokens + EVENTS_BESIDE_CONTENT)),
    }


def check_streams(load: Load, replies: Sequence[Reply], *, max_tokens: int) -> None:
    """Raises BadAnswer unless all streams are complete and say the same."""
    streams = [reply.events() for reply in replies]
    counts = {len(events) + 1 for events in streams}
    if not load.rewrites and counts != {max_tokens + EVENTS_BESIDE_CONTENT}:
        raise BadAnswer(f"{sorted(counts)} events in place of {max_tokens + EVENTS_BESIDE_CONTENT}")
    if len({text_of(events) for events in streams}) != 1:
        raise BadAnswer("equal requests have got different texts")


async def measure_requests(load: Load) -> dict[str, object]:
    """Small answers without streaming, over kept connections."""
    meter = Meter()
    before = Sample.take(load, meter)
    share = -(-load.requests // load.connections)
    seconds = await asyncio.gather(*(ask_in_turn(load, meter, share) for _ in range(load.connections)))
    after = Sample.take(load, meter)
    count = share * load.connections
    return {
        "requests": count,
        "cpu_seconds_per_request": (after.proxy - before.proxy) / count,
        "request_seconds": [value for part in seconds for value in part],
    }


async def ask_in_turn(load: Load, meter: Meter, count: int) -> list[float]:
    """Seconds of each request; a connection that the server has closed is opened again."""
    request = load.request(stream=False, max_tokens=2)
    client: Client | None = None
    seconds: list[float] = []
    while len(seconds) < count:
        if client is None or not client.is_open:
            client = await connect(load.port, meter)
        try:
            reply = await client.request(request)
        except ConnectionError:  # a kept connection that the server closes as we write: every client tries again once
            client = await connect(load.port, meter)
            reply = await client.request(request)
        if reply.status() != 200 or not json.loads(reply.body())["choices"][0]["message"]["content"]:
            raise BadAnswer(f"status {reply.status()}: {reply.body()[:300]!r}")
        seconds.append(reply.done_at - reply.sent_at)
        if b"connection: close" in reply.raw.partition(b"\r\n\r\n")[0].lower():
            client.close()
    if client is not None:
        client.close()
    return seconds


async def measure_idle(load: Load) -> dict[str, object]:
    """Before any load: memory, and CPU seconds per second where a time to look is given."""
    before, meter = time.monotonic(), Meter()
    start = Sample.take(load, meter)
    await asyncio.sleep(load.idle_seconds)
    spent = (Sample.take(load, meter).proxy - start.proxy) / (time.monotonic() - before)
    return {"idle_resident_bytes": resident_bytes(load.proxy_pids), "idle_load": spent if load.idle_seconds else 0.0}


async def measure(load: Load) -> dict[str, object]:
    """Idle, bursts, streams and requests, in this order; what is asked for 0 times is left out."""
    result = await measure_idle(load)
    result |= await measure_bursts(load)
    result |= await measure_streams(load)
    return result | (await measure_requests(load) if load.requests else {})


if __name__ == "__main__":
    print(json.dumps(uvloop.run(measure(Load(**json.loads(sys.argv[1]))))))
