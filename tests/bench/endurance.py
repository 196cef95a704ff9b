"""Long and many streams: the bytes of each against the engine's, what the gateway adds between tokens, its memory.

`python -m tests.bench.endurance --model FILE.gguf`; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import uvloop

from .client import Client, Meter, Reply, connected, render_request
from .processes import CannotRun, resident_bytes
from .proxies import MODEL, PARTICIPANTS, Setting, Target, settle
from .relay import percentile

ADDED_SECONDS = 0.025
RESIDENT_BYTES = 250e6


@dataclass(frozen=True, slots=True)
class Plan:
    """So many streams, each with ``rate`` tokens per second for ``seconds``."""

    name: str
    streams: int
    rate: float
    seconds: float

    @property
    def tokens(self) -> int:
        """Of one stream; the first comes at once."""
        return math.ceil(self.seconds * self.rate) + 1

    def setting(self, folder: Path, arguments: argparse.Namespace) -> Setting:
        """The fake engine writes down what it sent."""
        return Setting(
            folder=folder,
            streams=self.streams,
            rate=self.rate,
            context=(self.tokens // 256 + 2) * 256,
            model=arguments.model.resolve(),
            gateway_command=arguments.gateway_command,
            digests=folder / "digests",
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one plan through one participant."""

    streams: int
    equal_streams: int
    gap_seconds_p50: float
    gap_seconds_p99: float
    gap_seconds_max: float
    resident_bytes: int


class TimedClient(Client):
    """Notes when each piece with an event came."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self.arrivals = array("d")

    def data_received(self, data: bytes) -> None:
        """A piece of the answer."""
        if b"data: " in data:
            self.arrivals.append(time.monotonic())
        super().data_received(data)


async def run_stream(target: Target, plan: Plan, meter: Meter) -> tuple[Reply, array[float]]:
    """One stream to its end."""
    client = await connected(TimedClient(meter), target.port)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "max_tokens": plan.tokens}
    # With the usage, which the gateway would otherwise take out.
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        return await client.request(render_request(body, target.headers)), client.arrivals
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class Streams:
    """Each answer with the times of its pieces, and the memory while all of them ran."""

    answers: Sequence[tuple[Reply, array[float]]]
    resident_bytes: int

    def outcome(self, sent: dict[str, str]) -> Outcome:
        """Compared with the digests that the engine wrote down by id."""
        gaps = [later - earlier for _, times in self.answers for earlier, later in pairwise(times)]
        return Outcome(
            streams=len(self.answers),
            equal_streams=sum(is_as_sent(reply, sent) for reply, _ in self.answers),
            gap_seconds_p50=percentile(gaps, 0.5),
            gap_seconds_p99=percentile(gaps, 0.99),
            gap_seconds_max=max(gaps),
            resident_bytes=self.resident_bytes,
        )


async def run_streams(target: Target, plan: Plan) -> Streams:
    """All streams of a plan, begun over half a second."""
    meter = Meter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for _ in range(plan.streams):
            tasks.append(group.create_task(run_stream(target, plan, meter)))
            await asyncio.sleep(0.5 / plan.streams)
        await asyncio.sleep(plan.seconds * 0.8)
        resident = resident_bytes(target.proxy_pids)
    return Streams([task.result() for task in tasks], resident)


def is_as_sent(reply: Reply, sent: dict[str, str]) -> bool:
    """Whether the body has the digest that the engine wrote down for it."""
    identity = str(reply.events()[0]["id"])
    return sent.get(identity) == hashlib.sha256(reply.body()).hexdigest()


def measure(name: str, plan: Plan, arguments: argparse.Namespace) -> Outcome:
    """One participant; raises CannotRun or BadAnswer."""
    print(f"{name}: {plan.streams} streams for {plan.seconds:g} s …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        setting = plan.setting(Path(folder), arguments)
        with PARTICIPANTS[name](setting) as target:
            settle()
            streams = uvloop.run(run_streams(target, plan))
        sent = dict(line.split() for line in (Path(folder) / "digests").read_text().splitlines())
    return streams.outcome(sent)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.endurance", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="long streams side by side")
    parser.add_argument("--rate", type=float, default=15.0, help="tokens per second of each")
    parser.add_argument("--seconds", type=float, default=300.0, help="length of each")
    parser.add_argument("--slow-streams", type=int, default=1000, help="streams of one token per 5 s")
    parser.add_argument("--slow-seconds", type=float, default=30.0, help="length of each")
    parser.add_argument("--model", type=Path, default=os.environ.get("GATEWAY_TEST_MODEL"), help="a GGUF file")
    parser.add_argument("--gateway-command", default=f"{sys.executable} -m app serve --config {{config}}")
    parser.add_argument("--json", action="store_true", help="print all figures as well")
    arguments = parser.parse_args(argv)
    if arguments.model is None:
        parser.error("--model is needed: a GGUF file")
    return arguments


def verdicts(long: Outcome, direct: Outcome, slow: Outcome) -> list[tuple[bool, str]]:
    """What was to be shown, and whether it holds."""
    added = long.gap_seconds_p99 - direct.gap_seconds_p99
    gaps = f"p99 {direct.gap_seconds_p99 * 1e3:.1f} ms direct, {long.gap_seconds_p99 * 1e3:.1f} ms through the gateway"
    return [
        (long.equal_streams == long.streams, f"{long.equal_streams} of {long.streams} long streams are the engine's"),
        (added <= ADDED_SECONDS, f"between tokens {added * 1e3:.1f} ms added at p99 (at most 25): {gaps}"),
        (slow.equal_streams == slow.streams, f"{slow.equal_streams} of {slow.streams} slow streams are the engine's"),
        (
            slow.resident_bytes <= RESIDENT_BYTES,
            f"{slow.resident_bytes / 1e6:.0f} MB resident with {slow.streams} slow streams (at most 250)",
        ),
    ]


def main(argv: Sequence[str]) -> int:
    """0 when everything holds."""
    arguments = parse_arguments(argv)
    plan = Plan("long", arguments.streams, arguments.rate, arguments.seconds)
    slow_plan = Plan("slow", arguments.slow_streams, 0.2, arguments.slow_seconds)
    try:
        direct = measure("direct", plan, arguments)
        long = measure("gateway", plan, arguments)
        slow = measure("gateway", slow_plan, arguments)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"direct": asdict(direct), "long": asdict(long), "slow": asdict(slow)}, indent=1))
    shown = verdicts(long, direct, slow)
    for holds, what in shown:
        print(f"{'holds' if holds else 'FAILS'}: {what}.")
    return int(not all(holds for holds, _ in shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
