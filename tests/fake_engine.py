"""A program that takes llama-server's command line and behaves like it, or as badly as its switches say.

`python tests/fake_engine.py --host SOCKET --alias NAME -c 8192 -np 4 --api-key-file FILE`; the switches are the fields
of `Switches`, as JSON in the environment variable FAKE_ENGINE. Framing, headers, texts and exit codes are those seen on
llama-server build 11669. It imports nothing of the gateway, and costs about 30 µs of CPU per streamed chunk.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from fake_completion import Completion, Refusal, encode, render, tokenize
from fake_switches import OPTIONS, VERSION, CommandLine, Switches

if sys.platform != "win32":
    import uvloop

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\nX-Accel-Buffering: no\r\n"
    b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n%b\r\n\r\n"
)
KEEP, CLOSE = "Keep-Alive: timeout=5, max=100", "Connection: close"
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Internal Server Error"}


class Connection(asyncio.Protocol):
    """HTTP/1.1 as cpp-httplib speaks it: one request at a time, bodies by Content-Length, closed after an error."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._served = 0
        self.closes = False  # after the answer that is being given
        self._idle: asyncio.TimerHandle | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._digest: hashlib._Hash | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._next_request()

    def eof_received(self) -> bool:
        return False  # a half-closed client counts as gone, as in llama-server

    def connection_lost(self, exc: Exception | None) -> None:
        self._flowing.set()
        if self._idle:
            self._idle.cancel()
        if self._task:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._flowing.clear()

    def resume_writing(self) -> None:
        self._flowing.set()

    def _next_request(self) -> None:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        if not found or len(rest) < size:
            return
        self._buffer = rest[size:]
        if self._idle:
            self._idle.cancel()
        self._task = asyncio.get_running_loop().create_task(self._answer(head.decode("latin-1"), rest[:size]))

    async def _answer(self, head: str, body: bytes) -> None:
        lines = head.split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        self._served += 1
        self.closes = self._served >= 100 or headers.get("connection", "").lower() == "close"
        try:
            document = await self.engine.answer(self, f"{method} {target.partition('?')[0]}", headers, body)
            if document is not None:
                self.reply(200, document)
        except Refusal as refusal:
            self.closes = True
            self.reply(refusal.status, refusal.body)
        self._task = None
        if self.closes or self.engine.switches.close_after_response:
            self.transport.close()
        elif not self.transport.is_closing():
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self.engine.switches.keep_alive_seconds, self.transport.close)
            self._next_request()

    def start_stream(self) -> None:
        self._digest = hashlib.sha256() if self.engine.switches.digests else None
        self.transport.write(STREAM_HEAD % (CLOSE if self.closes else KEEP).encode())

    def reply(self, status: int, document: object) -> None:
        content = encode(document)
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Service Unavailable')}\r\nServer: llama.cpp\r\n"
            "Access-Control-Allow-Origin: \r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(content)}\r\n{CLOSE if self.closes else KEEP}\r\n\r\n"
        )
        self.transport.write(head.encode() + content)

    async def send(self, content: bytes) -> None:
        """One HTTP chunk, or many small ones; waits while the client does not read."""
        if self._digest is not None:
            self._digest.update(content)
        size = self.engine.switches.segment_bytes or len(content)
        for start in range(0, len(content), size):
            piece = content[start : start + size]
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if size < len(content):
                await asyncio.sleep(0)
        await self._flowing.wait()

    def record_stream(self, identity: str) -> None:
        """For whoever compares what arrives with what was sent."""
        if self._digest is not None:
            with Path(self.engine.switches.digests).open("a") as file:
                file.write(f"{identity} {self._digest.hexdigest()}\n")


class Engine:
    """The server: its slots, its switches and what it counts."""

    def __init__(self, line: CommandLine, switches: Switches) -> None:
        self.line = line
        self.switches = switches
        self.ready_since: float | None = None
        self.calls: collections.Counter[str] = collections.Counter()
        self.n_slots = switches.slots or line.parallel
        self.n_ctx = switches.nctx or -(-line.context // line.parallel // 256) * 256
        self._idle_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(self.n_slots):
            self._idle_slots.put_nowait(slot)
        self._busy_slots: set[int] = set()
        self._started_streams = 0
        self._death, _, self._death_at = switches.die.partition("@")

    async def answer(self, connection: Connection, call: str, headers: Mapping[str, str], body: bytes) -> object:
        """The document of the answer; None when the answer went out as a stream. Raises Refusal."""
        path = call.partition(" ")[2]
        if path != "/calls":
            self.calls[path] += 1
        if self.switches.log_headers:
            log(f"{call} came with {json.dumps(headers)}")
        self._refuse_while_loading(path)
        if path not in ("/health", "/v1/health", "/calls"):
            self._refuse_stranger(headers)
        routes: dict[str, Callable[[], object]] = {
            "GET /health": lambda: {"status": "ok"},
            "GET /props": self._props,
            "GET /v1/models": self._models,
            "GET /slots": self._slots,
            "GET /calls": lambda: dict(self.calls),
            "POST /tokenize": lambda: {"tokens": tokenize(str(json.loads(body).get("content", "")))},
            "POST /apply-template": lambda: {"prompt": render(json.loads(body)["messages"])},
            "POST /v1/chat/completions/input_tokens": lambda: {
                "input_tokens": len(tokenize(render(json.loads(body)["messages"]))),
                "object": "response.input_tokens",
            },
        }
        try:
            if call in ("POST /v1/chat/completions", "POST /chat/completions"):
                return await self._complete(connection, json.loads(body))
            if call in routes and (path != "/calls" or self.switches.count_calls):
                return routes[call]()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refusal(400, "invalid_request_error", f"{type(error).__name__}: {error}") from error
        raise Refusal(404, "not_found_error", "File Not Found")

    def _refuse_while_loading(self, path: str) -> None:
        early = self.switches.models_ready_early and path == "/v1/models"
        flap = self.switches.health_flap_seconds
        down = self.ready_since is None
        if self.ready_since is not None and flap and path == "/health":
            down = int((time.monotonic() - self.ready_since) / flap) % 2 == 1
        if down and not early and path != "/calls":
            raise Refusal(503, "unavailable_error", "Loading model")

    def _refuse_stranger(self, headers: Mapping[str, str]) -> None:
        given = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
        if self.line.keys and given not in self.line.keys:
            raise Refusal(401, "authentication_error", "Invalid API Key")

    async def _complete(self, connection: Connection, body: Mapping[str, Any]) -> object:
        if self._death_at == "request":
            await self._die(connection)
        completion = Completion(body, alias=self.line.alias, context=self.n_ctx, switches=self.switches)
        slot = -1
        try:
            slot = await self._idle_slots.get()
            self._busy_slots.add(slot)
            self._flood()
            return await self._generate(connection, completion)
        except asyncio.CancelledError:
            self.calls["departed"] += 1
            raise
        finally:
            if slot >= 0:
                self._busy_slots.discard(slot)
                self._idle_slots.put_nowait(slot)

    async def _generate(self, connection: Connection, completion: Completion) -> object:
        self._started_streams += 1
        phase = self._started_streams * 0.618034 % 1 if self.switches.spread_phases else 1.0
        start = time.monotonic() + (phase - 1) * self.switches.chunk_interval_seconds
        if completion.stream:
            connection.start_stream()
        for number in range(completion.tokens):
            start += await self._pause(number, start)
            if self._death_at == str(number):
                await self._die(connection)
            if number == self.switches.error_event:
                await self._fail(connection, completion)
                return None
            if not completion.stream:
                continue
            event = self.switches.ping.encode() + completion.chunk(number)
            if number == self.switches.half_line:
                await connection.send(event[: len(event) // 2])
                connection.transport.write(b"0\r\n\r\n")
                return None
            await connection.send(event)
        if not completion.stream:
            return completion.document()
        await connection.send(completion.end())
        await connection.send(b"data: [DONE]\n\n")
        connection.record_stream(completion.id)
        connection.transport.write(b"0\r\n\r\n")
        return None

    async def _pause(self, number: int, start: float) -> float:
        """Waits until chunk `number` is due; the seconds by which all later ones are later."""
        late = self.switches.silence_seconds if number == self.switches.silence_at else 0.0
        due = start + late + number * self.switches.chunk_interval_seconds
        await asyncio.sleep(max(0.0, due - time.monotonic()) if number or late else 0)
        return late

    async def _fail(self, connection: Connection, completion: Completion) -> None:
        refusal = Refusal(500, "server_error", "Context size has been exceeded.")
        if not completion.stream:
            raise refusal
        await connection.send(b"data: " + encode(refusal.body) + b"\n\n")
        connection.transport.write(b"0\r\n\r\n")

    async def _die(self, connection: Connection) -> None:
        await asyncio.sleep(0.01)  # what was written before has left the process by then
        if self._death == "rst":
            linger = struct.pack("ii", 1, 0)
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.transport.abort()
        elif self._death == "eof":
            connection.transport.close()
        else:
            self._end_process()
        await asyncio.Event().wait()  # cancelled by connection_lost

    def _end_process(self) -> NoReturn:
        if self._death in ("sigkill", "sigill"):
            os.kill(os.getpid(), getattr(signal, self._death.upper()))
        os._exit(137 if self._death == "exit137" else 1)

    def _props(self) -> object:
        settings = {"params": {"temperature": 0.8, "max_tokens": -1}, "n_ctx": self.n_ctx}
        names = {"total_slots": self.n_slots, "model_alias": self.line.alias, "model_path": "fake.gguf"}
        modalities = {"vision": False, "video": False, "audio": self.switches.audio}
        rest = {"modalities": modalities, "chat_template": "", "build_info": "b11669-fake", "is_sleeping": False}
        return {"default_generation_settings": settings, **names, **rest}

    def model(self) -> dict[str, Any]:
        meta = {"vocab_type": 2, "n_vocab": 49152, "n_ctx": self.n_ctx, "n_ctx_train": 8192, "n_embd": 576}
        meta |= {"n_params": 134515008, "size": 96576768}
        modalities = {"input_modalities": ["text"], "output_modalities": ["text"]}
        names = {"id": self.line.alias, "aliases": [self.line.alias], "tags": [], "object": "model"}
        return {**names, "architecture": modalities, "created": int(time.time()), "owned_by": "llamacpp", "meta": meta}

    def _models(self) -> object:
        named = {"name": self.line.alias, "model": self.line.alias, "capabilities": ["completion"]}
        return {"models": [named], "object": "list", "data": [self.model()]}

    def _slots(self) -> object:
        return [
            {"id": slot, "n_ctx": self.n_ctx, "speculative": False, "is_processing": slot in self._busy_slots}
            for slot in range(self.n_slots)
        ]

    def _flood(self) -> None:
        for number in range(self.switches.log_flood):
            log(f"slot launch_slot_: id  0 | task {number} | processing task, is_child = 0")

    async def load(self) -> None:
        """Writes what a load writes, then is ready."""
        log("srv    load_model: loading model 'fake.gguf'")
        self._flood()
        if self.switches.long_line:
            log("x" * self.switches.long_line)
        for line in (*self.switches.log_lines, *self._offload_lines()):
            log(line)
        await asyncio.sleep(self.switches.load_seconds)
        if any(f"{flag} " in self.line.words for flag in self.switches.no_memory_for):
            self._run_out_of_memory()
        if self._death_at == "load":
            self._end_process()
        slots = f"n_slots = {self.n_slots}, n_ctx_slot = {self.n_ctx}, kv_unified = 'false'"
        log(f"srv    load_model: initializing, {slots}")
        log("srv  llama_server: model loaded")
        self.ready_since = time.monotonic()
        if self._death_at.endswith("s"):
            await asyncio.sleep(float(self._death_at[:-1]))
            self._end_process()

    def _run_out_of_memory(self) -> NoReturn:
        device = "allocating 512.00 MiB on device 0: cudaMalloc failed: out of memory"
        host = "alloc_tensor_range: failed to allocate CPU buffer of size 536870912"
        log(device if self.switches.no_memory_of == "device" else host)
        os._exit(1)

    def _offload_lines(self) -> list[str]:
        failed = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"
        lines = [failed] if self.switches.offloaded.startswith("0/") else []
        return (
            [*lines, f"load_tensors: offloaded {self.switches.offloaded} layers to GPU"]
            if self.switches.offloaded
            else []
        )


def log(line: str) -> None:
    print(f"0.00.001.000 I {line}", file=sys.stderr, flush=True)


def bind(line: CommandLine) -> socket.socket:
    """A listening socket; like llama-server, refuses a path that exists and leaves its own behind."""
    is_path = "/" in line.host or line.host.endswith(".sock")
    listener = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    try:
        if not is_path:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(line.host if is_path else (line.host, line.port))
        listener.listen(1024)
    except OSError:
        listener.close()
        log(f"srv         start: couldn't bind HTTP server socket, hostname: {line.host}, port: {line.port}")
        sys.exit(1)
    port = "" if is_path else f":{listener.getsockname()[1]}"
    log(f"srv  llama_server: listening on {'unix' if is_path else 'http'}://{line.host}{port}")
    return listener


async def obey_router(engine: Engine, stop: asyncio.Event) -> None:
    """The part of a router's child: report ready on stdout, leave when stdin says so or ends."""
    state = {"state": "ready", "payload": engine.model()}
    print("cmd_child_to_router:state:" + encode(state).decode(), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while (line := await reader.readline()) and b"cmd_router_to_child:exit" not in line:
        pass
    stop.set()


async def serve(line: CommandLine, switches: Switches) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        ignored = switches.ignore_sigterm and number == signal.SIGTERM
        loop.add_signal_handler(number, (lambda: log("SIGTERM ignored")) if ignored else stop.set)
    engine = Engine(line, switches)
    listener = bind(line)
    start = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
    await start(lambda: Connection(engine), sock=listener)
    tasks = [loop.create_task(engine.load())]
    if os.environ.get("LLAMA_SERVER_ROUTER_PORT"):
        tasks.append(loop.create_task(obey_router(engine, stop)))
    await stop.wait()
    os._exit(0)  # open streams are cut without an error event, as llama-server cuts them


def main(argv: Sequence[str]) -> None:
    if "--version" in argv:
        sys.stderr.write(VERSION)
    elif {"-h", "--help", "--usage"} & set(argv):
        heads = OPTIONS.replace("\n", ";").split(";")
        print("----- common params -----\n\n" + "\n".join(f"{head:<40}as in llama-server" for head in heads))
    elif "--list-devices" in argv:
        print("Available devices:\n  " + os.environ.get("FAKE_DEVICES", "(none)"))
    else:
        line, switches = CommandLine.parse(argv), Switches.parse(os.environ.get("FAKE_ENGINE", "{}"))
        run = uvloop.run if sys.platform != "win32" else asyncio.run
        run(serve(line, switches))


if __name__ == "__main__":
    main(sys.argv[1:])
