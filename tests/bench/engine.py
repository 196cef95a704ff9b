"""Tokens per second of a real engine, direct against through the gateway.

`python -m tests.bench.engine --model FILE.gguf [--engine LLAMA_SERVER]`; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .client import BadAnswer, Meter, connect, render_request, text_of
from .processes import CannotRun, children, free_port, running, wait_until
from .proxies import KEY, MODEL, Target, answers, completes, gateway_key

DIRECT_KEY = "bench-engine-key"
PROMPT = "Write a long story about a lighthouse keeper who collects letters from the sea."


@dataclass(frozen=True, slots=True)
class Answer:
    """One measured answer; the times are those of time.monotonic."""

    text: str
    tokens: int
    sent_at: float
    first_at: float
    done_at: float


@dataclass(frozen=True, slots=True)
class Round:
    """The answers to all clients of one side, asked at once."""

    answers: Sequence[Answer]

    @property
    def first_token_seconds(self) -> float:
        """Of the client in the middle."""
        return statistics.median(answer.first_at - answer.sent_at for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Of all clients, from the first token of the first to the last of the last."""
        tokens = sum(answer.tokens - 1 for answer in self.answers)
        return tokens / (max(one.done_at for one in self.answers) - min(one.first_at for one in self.answers))


@dataclass(frozen=True, slots=True)
class Side:
    """Where to ask, and with which key."""

    address: int | str
    key: str

    async def ask_at_once(self, clients: int, max_tokens: int) -> Round:
        return Round(await asyncio.gather(*(self.ask(max_tokens) for _ in range(clients))))

    async def ask(self, max_tokens: int) -> Answer:
        body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens, "seed": 1}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        client = await connect(self.address, Meter())
        try:
            reply = await client.request(render_request(body, {"Authorization": f"Bearer {self.key}"}))
        finally:
            client.close()
        events = reply.events()
        tokens = next(event["usage"]["completion_tokens"] for event in reversed(events) if event.get("usage"))
        return Answer(text_of(events), tokens, reply.sent_at, reply.first_at, reply.done_at)


@contextlib.contextmanager
def run_gateway(folder: Path, arguments: argparse.Namespace) -> Iterator[Target]:
    """The gateway with the real engine behind it."""
    model: dict[str, object] = {"path": str(arguments.model), "context": 2048, "parallel": arguments.clients}
    port, log, configuration = free_port(), folder / "gateway.log", folder / "config.yaml"
    settings = {
        "server": {"port": port},
        "engine": {"binary": arguments.engine},
        "models": {MODEL: model},
        "keys": [gateway_key()],
        "state_dir": str(folder / "state"),
    }
    configuration.write_text(json.dumps(settings))
    argv = [word.replace("{config}", str(configuration)) for word in shlex.split(arguments.gateway_command)]
    with running(argv, log=log) as gateway:
        wait_until(lambda: answers(port, path="/livez"), gateway, what="The gateway", log=log, seconds=30)
        target = Target(port, headers={"Authorization": f"Bearer {KEY}"})
        wait_until(lambda: completes(target), gateway, what="The model behind the gateway", log=log, seconds=120)
        yield Target(port, proxy_pids=(gateway.pid,), engine_pids=tuple(children(gateway.pid)))


@contextlib.contextmanager
def run_twin(folder: Path, engine_pid: int) -> Iterator[Side]:
    """A second engine with the command line and environment of the gateway's own, on a socket and key of ours."""
    argv = Path(f"/proc/{engine_pid}/cmdline").read_text().split("\0")[:-1]
    pairs = Path(f"/proc/{engine_pid}/environ").read_text().split("\0")[:-1]
    key_file, address, log = folder / "direct.key", str(folder / "direct.sock"), folder / "direct.log"
    key_file.write_text(DIRECT_KEY + "\n")
    for option, value in (("--host", address), ("--api-key-file", str(key_file))):
        argv[argv.index(option) + 1] = value
    with running(argv, log=log, env=dict(pair.split("=", 1) for pair in pairs)) as twin:
        side = Side(address, DIRECT_KEY)
        wait_until(lambda: is_loaded(side), twin, what="The engine", log=log, seconds=120)
        yield side


def is_loaded(side: Side) -> bool:
    try:
        asyncio.run(side.ask(2))
    except (OSError, ValueError, BadAnswer):
        return False
    return True


def cores(text: str) -> tuple[int, int]:
    """Two different cores that this process may use; raises ValueError."""
    engine, others = (int(word) for word in text.split(","))
    if engine == others or not {engine, others} <= os.sched_getaffinity(0):
        raise ValueError(text)
    return engine, others


def pin(pids: Iterable[int], core: int) -> None:
    """All threads of these processes, and those that they will start."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def measure(arguments: argparse.Namespace) -> dict[str, list[Round]]:
    """Interleaved, each pair in the other order than the one before; raises CannotRun."""
    if arguments.pin:
        # Whoever is started inherits the single core, and so the plan has a single thread.
        os.sched_setaffinity(0, {arguments.pin[1]})
    with tempfile.TemporaryDirectory(prefix="engine-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        gateway = stack.enter_context(run_gateway(folder, arguments))
        twin = stack.enter_context(run_twin(folder, gateway.engine_pids[0]))
        if arguments.pin:
            engines = [pid for pid in children(os.getpid()) if pid not in gateway.proxy_pids]
            pin([*gateway.engine_pids, *engines], arguments.pin[0])
        sides = {"direct": twin, "gateway": Side(gateway.port, KEY)}
        results: dict[str, list[Round]] = {label: [] for label in sides}
        for side in sides.values():
            asyncio.run(side.ask_at_once(arguments.clients, arguments.max_tokens))
        for pair in range(arguments.pairs):
            for label in sorted(sides, reverse=pair % 2 == 1):
                results[label].append(asyncio.run(sides[label].ask_at_once(arguments.clients, arguments.max_tokens)))
        return results


def texts(results: dict[str, list[Round]]) -> set[str]:
    return {answer.text for side in results.values() for one in side for answer in one.answers}


def render_table(results: dict[str, list[Round]]) -> str:
    direct = statistics.median(one.tokens_per_second for one in results["direct"])
    lines = ["|  | tokens/s median (min-max) | of direct | first token, ms | tokens |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for label, side in results.items():
        rates = [one.tokens_per_second for one in side]
        tokens = sum(answer.tokens for answer in side[0].answers)
        median, first = statistics.median(rates), statistics.median(one.first_token_seconds for one in side)
        spread = f"{median:.1f} ({min(rates):.1f}-{max(rates):.1f})"
        lines.append(f"| {label} | {spread} | {median / direct:.1%} | {first * 1e3:.1f} | {tokens} |")
    return "\n".join(lines) + f"\n\nAll answers are {'equal' if len(texts(results)) == 1 else 'NOT equal'}."


def main(argv: Sequence[str]) -> int:
    """0 when both sides were measured and gave the same text."""
    environ = os.environ.get
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine", description=__doc__)
    parser.add_argument("--engine", default=environ("GATEWAY_TEST_ENGINE", "embedded"), help="llama-server")
    parser.add_argument("--model", type=Path, default=environ("GATEWAY_TEST_MODEL"), help="a GGUF file")
    parser.add_argument("--clients", type=int, default=1, help="asking at once, each with a slot of its own")
    parser.add_argument("--pin", type=cores, help="two cores, like 0,1: of the engine (one thread), and of all others")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--gateway-command", default=f"{sys.executable} -m app serve --config {{config}}")
    parser.add_argument("--json", action="store_true", help="print all figures instead of the table")
    arguments = parser.parse_args(argv)
    if arguments.model is None:
        parser.error("--model is needed: a GGUF file")
    try:
        results = measure(arguments)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 1
    figures = {label: [asdict(one) for one in side] for label, side in results.items()}
    print(json.dumps(figures) if arguments.json else render_table(results))
    return int(len(texts(results)) != 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
