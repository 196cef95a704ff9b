"""What the gate costs: CPU of the gateway and time until a request may enter its queue, by length of conversation.

`python -m tests.bench.gate --model FILE.gguf [--engine LLAMA_SERVER]`; see README.md beside this file.

Each conversation grows by five turns. ``affine`` is the bound from the sizes alone, in a context so large that it
settles everything; the others are measured where it does not: rendering and counting by fragments, and the engine's
count of the whole prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from app.metrics import Metrics
from app.protocol import ChatRequest, parse_chat_request
from app.quota import Limits, Quota, SQLiteStore
from app.scheduler import Demand, Scheduler
from app.tokens import (
    TokenCounter,
    VocabularyBound,
    calibrate_fragments,
    calibrate_template,
    read_vocabulary,
)

from .processes import CannotRun, free_port, running, wait_until
from .proxies import answers

KEY = "bench-gate-key"
TURNS = 5
SENTENCE = "The keeper of the lighthouse collects letters from the sea and answers every one of them. "
# About 16 tokens a sentence.
SIZES = {"200 tokens": 12, "4k tokens": 250, "30k tokens": 1875}
_ROOMY, _TIGHT = 1 << 24, 40_000


class Source:
    """The engine, asked as the gateway asks it."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def _ask(self, path: str, body: bytes) -> Any:
        async with self._session.post(path, data=body) as answer:
            answer.raise_for_status()
            return orjson.loads(await answer.read())

    async def count_chat(self, body: bytes) -> int:
        return int((await self._ask("/v1/chat/completions/input_tokens", body))["input_tokens"])

    async def render(self, body: bytes) -> str:
        return str((await self._ask("/apply-template", body))["prompt"])

    async def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return await self.render(orjson.dumps({"messages": messages}))

    async def tokenize(self, text: str) -> int:
        body = {"content": text, "add_special": False, "parse_special": True}
        return len((await self._ask("/tokenize", orjson.dumps(body)))["tokens"])


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one way to decide, at one length, in one turn."""

    way: str
    length: str
    turn: int
    cpu_ms: float
    wall_ms: float
    prompt_tokens: int
    exact: bool


def conversation(sentences: int, turn: int, *, seed: int) -> ChatRequest:
    """The first turn has all but a few of the sentences; ``seed`` makes it one that no cache knows."""
    messages = [{"role": "system", "content": f"You are agent {seed}."}]
    messages.append({"role": "user", "content": SENTENCE * sentences})
    for index in range(1, turn):
        messages.append({"role": "assistant", "content": SENTENCE * 2})
        messages.append({"role": "user", "content": f"{index}: go on."})
    return parse_chat_request(orjson.dumps({"model": "m", "messages": messages, "max_tokens": 16}))


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, float, Any]:
    """CPU and wall time of this process, in milliseconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = await work()
    return (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3, result


async def measure_way(way: str, counter: TokenCounter, *, repeat: int, first_seed: int) -> list[Cost]:
    costs = []
    for length, sentences in SIZES.items():
        samples: dict[int, list[tuple[float, float, Any]]] = {turn: [] for turn in range(1, TURNS + 1)}
        for seed in range(first_seed, first_seed + repeat):
            for turn, sample in samples.items():
                request = conversation(sentences, turn, seed=seed)
                sample.append(await timed(lambda request=request: counter.admit(request, default_max_tokens=16)))  # type: ignore[misc]
        for turn in (1, TURNS):
            cpu = statistics.median(sample[0] for sample in samples[turn])
            wall = statistics.median(sample[1] for sample in samples[turn])
            admission = samples[turn][0][2]
            costs.append(Cost(way, length, turn, cpu, wall, admission.prompt_tokens, admission.exact))
    return costs


async def measure_rest(folder: Path, *, repeat: int) -> list[Cost]:
    """The budget in its file and the lease, without waiting for a slot."""
    quota, scheduler = Quota(SQLiteStore(folder / "quota.db")), Scheduler(Metrics())
    limits = Limits(tokens_per_day=1 << 40)
    await quota.open()

    async def once() -> None:
        async with (
            quota.reserve("k", limits, tokens=100),
            scheduler.lease("m", key="k", capacity=1, max_queue=1, demand=Demand(100, 16)),
        ):
            pass

    try:
        samples = [await timed(once) for _ in range(repeat * 20)]
    finally:
        await quota.close()
    cpu, wall = (statistics.median(sample[index] for sample in samples) for index in (0, 1))
    return [Cost("budget + lease", "any", 1, cpu, wall, 100, True)]


async def measure(port: int, arguments: argparse.Namespace) -> list[Cost]:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
        source = Source(session)
        vocabulary, bound = read_vocabulary(arguments.model), VocabularyBound(1, 3)
        if vocabulary is None or (fragments := await calibrate_fragments(source, vocabulary)) is None:
            raise CannotRun("this model's prompts cannot be counted by fragments")
        template = await calibrate_template(source)
        ways = {
            "affine": TokenCounter(source, context_tokens=_ROOMY, vocabulary=bound, template=template),
            # A bound that never settles anything, so that the count does.
            "fragments": TokenCounter(
                source,
                context_tokens=_TIGHT,
                vocabulary=VocabularyBound(1, _TIGHT),
                template=None,
                rendering=source,
                longest_token_bytes=vocabulary.longest_token_bytes,
                fragments=fragments,
            ),
            "whole count": TokenCounter(source, context_tokens=_TIGHT, vocabulary=None, template=None),
        }
        costs = []
        for number, (way, counter) in enumerate(ways.items()):
            costs += await measure_way(way, counter, repeat=arguments.repeat, first_seed=1000 * number)
    with tempfile.TemporaryDirectory() as folder:
        return costs + await measure_rest(Path(folder), repeat=arguments.repeat)


def render_table(costs: Sequence[Cost]) -> str:
    lines = ["| way | conversation | turn | prompt tokens | CPU, ms | added time, ms |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for cost in costs:
        tokens = f"{cost.prompt_tokens}" if cost.exact else f"at most {cost.prompt_tokens}"
        lines.append(
            f"| {cost.way} | {cost.length} | {cost.turn} | {tokens} | {cost.cpu_ms:.2f} | {cost.wall_ms:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gate", description=__doc__)
    parser.add_argument("--engine", default=os.environ.get("GATEWAY_TEST_ENGINE"), help="llama-server")
    parser.add_argument("--model", type=Path, default=os.environ.get("GATEWAY_TEST_MODEL"), help="a GGUF file")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print all figures instead of the table")
    arguments = parser.parse_args(argv)
    if arguments.model is None or arguments.engine is None:
        parser.error("--model and --engine are needed: a GGUF file and a llama-server")
    try:
        with tempfile.TemporaryDirectory(prefix="gate-") as name:
            folder = Path(name)
            (folder / "key").write_text(KEY + "\n")
            port, log = free_port(), folder / "engine.log"
            options = [
                "-m",
                str(arguments.model),
                "--port",
                str(port),
                "-c",
                "2048",
                "-np",
                "1",
                "--jinja",
                "--no-webui",
            ]
            with running([arguments.engine, *options, "--api-key-file", str(folder / "key")], log=log) as engine:
                wait_until(lambda: answers(port, path="/health"), engine, what="The engine", log=log, seconds=120)
                costs = asyncio.run(measure(port, arguments))
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 1
    print(json.dumps([asdict(cost) for cost in costs]) if arguments.json else render_table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
