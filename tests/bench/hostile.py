"""Clients that send half a request, and one that hardly reads: when they are let go, and what the others feel of it.

`python -m tests.bench.hostile --model FILE.gguf`; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop

from tests.fleet import fake_binary

from .client import Meter, connect, render_request, text_of
from .processes import CannotRun, children, free_port, resident_bytes, running, wait_until
from .proxies import KEY, MODEL, Target, answers, completes, gateway_key, settle

FLOOD = "flood"
FLOOD_CHUNK_BYTES = 64 << 10
CONTEXT = 8192
HEADERS = {"Authorization": f"Bearer {KEY}"}
HEAD_SECONDS, BODY_SECONDS, STALL_SECONDS = (
    10,
    60,
    60 + 15,
)  # what the gateway promises; stalls are looked for every 15 s
SLACK_SECONDS = 5
GROWN_BYTES = 64e6


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds until each was let go, and how fast the others were, alone and beside them."""

    half_heads: Sequence[float]
    half_bodies: Sequence[float]
    slow_reader: float
    grown_bytes: int
    seconds_alone: float
    seconds_beside: float


@contextlib.contextmanager
def run_gateway(folder: Path, arguments: argparse.Namespace) -> Iterator[Target]:
    """Two models on fake engines: one with paced streams, one that floods whoever asks."""
    paced = {"chunks": 10**9, "chunk_interval_seconds": 1 / arguments.rate, "slots": arguments.streams, "nctx": CONTEXT}
    flood = {"chunks": arguments.flood_bytes // FLOOD_CHUNK_BYTES, "content": "x" * FLOOD_CHUNK_BYTES, "nctx": CONTEXT}
    for name, switches in ((MODEL, paced), (FLOOD, flood)):
        (folder / f"{name}.json").write_text(json.dumps(switches))
    port, log, configuration = free_port(), folder / "gateway.log", folder / "config.yaml"
    settings = {
        "server": {"port": port, "drain_seconds": 1},
        "engine": {"binary": str(fake_binary(folder))},
        "models": {
            name: {"path": str(arguments.model), "context": CONTEXT, "preload": True} for name in (MODEL, FLOOD)
        },
        "keys": [gateway_key()],
        "state_dir": str(folder / "state"),
    }
    configuration.write_text(json.dumps(settings))
    argv = [word.replace("{config}", str(configuration)) for word in shlex.split(arguments.gateway_command)]
    with running(argv, log=log, env={**os.environ, "FAKE_SWITCHES": str(folder)}) as gateway:
        wait_until(lambda: answers(port, path="/livez"), gateway, what="The gateway", log=log, seconds=60)
        target = Target(port, (gateway.pid,), headers=HEADERS)
        for name in (MODEL, FLOOD):
            wait_until(partial(completes, target, name), gateway, what=f"The model {name}", log=log, seconds=30)
        yield replace(target, engine_pids=tuple(children(gateway.pid)))


async def stream(port: int, tokens: int) -> None:
    """One well-behaved stream, which must be whole."""
    client = await connect(port, Meter())
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "max_tokens": tokens, "stream": True}
    try:
        reply = await client.request(render_request(body, HEADERS))
    finally:
        client.close()
    assert text_of(reply.events())


async def seconds_of_streams(port: int, arguments: argparse.Namespace) -> float:
    """How long so many streams side by side take."""
    started = time.monotonic()
    tokens = round(arguments.rate * arguments.seconds)
    await asyncio.gather(*(stream(port, tokens) for _ in range(arguments.streams)))
    return time.monotonic() - started


async def seconds_to_close(port: int, content: bytes) -> float:
    """How long a client is kept that sends this and no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    writer.write(content)
    await reader.read()
    writer.close()
    return time.monotonic() - started


async def seconds_to_drop(port: int, flood_socket: str) -> float:
    """How long the engine has to work for a client that reads one byte per second."""
    loop, connection = asyncio.get_running_loop(), socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    body = {"model": FLOOD, "messages": [{"role": "user", "content": "Write."}], "max_tokens": 4000, "stream": True}
    started = time.monotonic()
    with connection:
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, render_request(body, HEADERS))
        while not await departed(flood_socket):
            await loop.sock_recv(connection, 1)
            await asyncio.sleep(1)
    return time.monotonic() - started


async def departed(flood_socket: str) -> int:
    """How many clients the fake engine has seen leave before their end."""
    reader, writer = await asyncio.open_unix_connection(flood_socket)
    writer.write(b"GET /calls HTTP/1.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(json.loads(answer.partition(b"\r\n\r\n")[2]).get("departed", 0))


async def highest(target: Target, until: asyncio.Event) -> int:
    """The most memory seen."""
    most = 0
    while not until.is_set():
        most = max(most, resident_bytes(target.proxy_pids))
        await asyncio.sleep(0.25)
    return most


def socket_of(pids: Sequence[int], model: str) -> str:
    """Where the engine of this model listens."""
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--alias" in words and words[words.index("--alias") + 1] == model:
            return words[words.index("--host") + 1]
    raise CannotRun(f"No engine of {model} runs.")


async def attack(target: Target, arguments: argparse.Namespace) -> Outcome:
    """The streams alone, then all at once."""
    port = target.port
    alone = await seconds_of_streams(port, arguments)
    before, over = resident_bytes(target.proxy_pids), asyncio.Event()
    request = render_request({"model": MODEL, "messages": [], "padding": "x" * 1000}, HEADERS)
    half_head, half_body = request[: request.index(b"\r\n\r\n")], request[:-500]
    count = arguments.half_sent // 2
    memory = asyncio.create_task(highest(target, over))
    beside, slow, heads, bodies = await asyncio.gather(
        seconds_of_streams(port, arguments),
        seconds_to_drop(port, socket_of(target.engine_pids, FLOOD)),
        asyncio.gather(*(seconds_to_close(port, half_head) for _ in range(count))),
        asyncio.gather(*(seconds_to_close(port, half_body) for _ in range(count))),
    )
    over.set()
    return Outcome(heads, bodies, slow, await memory - before, alone, beside)


def verdicts(outcome: Outcome) -> list[tuple[bool, str]]:
    """What was to be shown, and whether it holds."""
    heads, bodies = max(outcome.half_heads), max(outcome.half_bodies)
    speed = outcome.seconds_alone / outcome.seconds_beside
    return [
        (heads <= HEAD_SECONDS + SLACK_SECONDS, f"{len(outcome.half_heads)} half heads closed after {heads:.1f} s"),
        (bodies <= BODY_SECONDS + SLACK_SECONDS, f"{len(outcome.half_bodies)} half bodies closed after {bodies:.1f} s"),
        (
            outcome.slow_reader <= STALL_SECONDS + SLACK_SECONDS,
            f"the reader of one byte per second was dropped after {outcome.slow_reader:.1f} s",
        ),
        (outcome.grown_bytes <= GROWN_BYTES, f"{outcome.grown_bytes / 1e6:.0f} MB more resident at most"),
        (speed >= 0.95, f"the streams beside them had {speed:.1%} of their speed"),
    ]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hostile", description=__doc__)
    parser.add_argument("--streams", type=int, default=50, help="well-behaved streams side by side")
    parser.add_argument("--rate", type=float, default=15.0, help="tokens per second of each")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each")
    parser.add_argument("--half-sent", type=int, default=500, help="requests that never end, half of them in the head")
    parser.add_argument("--flood-bytes", type=int, default=200_000_000, help="for the client that hardly reads")
    parser.add_argument("--model", type=Path, default=os.environ.get("GATEWAY_TEST_MODEL"), help="a GGUF file")
    parser.add_argument("--gateway-command", default=f"{sys.executable} -m app serve --config {{config}}")
    arguments = parser.parse_args(argv)
    if arguments.model is None:
        parser.error("--model is needed: a GGUF file")
    return arguments


def main(argv: Sequence[str]) -> int:
    """0 when everything holds."""
    arguments = parse_arguments(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder, run_gateway(Path(folder), arguments) as target:
            settle()
            outcome = uvloop.run(attack(target, arguments))
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 1
    shown = verdicts(outcome)
    for holds, what in shown:
        print(f"{'holds' if holds else 'FAILS'}: {what}.")
    return int(not all(holds for holds, _ in shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
