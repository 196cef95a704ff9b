"""Servers elsewhere: a real or a scripted engine on a port of its own, and one that answers but cannot count."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from aiohttp import web

_FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
KEY = "remote-key-that-nobody-may-see"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@dataclass
class EngineElsewhere:
    """A llama-server that we do not supervise; ``url`` ends in ``/v1``."""

    command: tuple[str, ...]
    port: int
    environment: dict[str, str]
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            *("--host", "127.0.0.1", "--port", str(self.port)),
            env=self.environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
            while True:
                try:
                    if (await client.get(f"http://127.0.0.1:{self.port}/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()

    async def calls(self) -> dict[str, int]:
        async with httpx.AsyncClient(trust_env=False) as client:
            found: dict[str, int] = (await client.get(f"http://127.0.0.1:{self.port}/calls")).json()
            return found


@asynccontextmanager
async def engine_elsewhere(
    command: Sequence[str], *, fake: dict[str, Any] | None = None
) -> AsyncIterator[EngineElsewhere]:
    """Run it until the block ends."""
    engine = EngineElsewhere(tuple(command), free_port(), os.environ | {"FAKE_ENGINE": json.dumps(fake or {})})
    await engine.start()
    try:
        yield engine
    finally:
        await engine.kill()


@asynccontextmanager
async def fake_elsewhere(key_file: Path, **switches: Any) -> AsyncIterator[EngineElsewhere]:
    """The scripted engine, behind a key."""
    await asyncio.to_thread(key_file.write_text, KEY + "\n")
    command = (sys.executable, str(_FAKE_ENGINE), "--api-key-file", str(key_file), "--alias", "theirs", "-c", "1024")
    async with engine_elsewhere((*command, "-np", "2"), fake=switches) as engine:
        yield engine


@dataclass
class Plain:
    """A server with nothing but models and chat completions; ``asked`` are the bodies that came."""

    upstream: str | None = None
    answer: tuple[int, dict[str, str], dict[str, Any]] | None = None
    answer_text: str | None = None
    hidden_tokens: int = 0
    context_tokens: int | None = 1024
    asked: list[dict[str, Any]] = field(default_factory=list)
    usages: list[int] = field(default_factory=list)

    async def models(self, request: web.Request) -> web.Response:
        limit = {} if self.context_tokens is None else {"max_model_len": self.context_tokens}
        return web.json_response({"object": "list", "data": [{"id": "plain-model", **limit}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.answer is not None:
            status, headers, document = self.answer
            return web.json_response(document, status=status, headers=headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if self.answer_text is not None:
            await response.write(self._events(self.answer_text))
            return response
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.upstream}/chat/completions", json=body) as reply,
        ):
            async for line in reply.content:
                if line.startswith(b"data: {") and (usage := json.loads(line[6:]).get("usage")):
                    self.usages.append(usage["prompt_tokens"])
                await response.write(line)
        return response

    def _events(self, text: str) -> bytes:
        usage = {"prompt_tokens": self.hidden_tokens or 10, "completion_tokens": 1, "total_tokens": 11}
        choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
        chunks = [
            {"choices": [choice]},
            {"choices": [choice | {"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "plain-model"}
        return (
            b"".join(b"data: " + json.dumps(head | chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
        )


@asynccontextmanager
async def plain_server(plain: Plain, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Its base address."""
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.get("/v1/models", plain.models), web.post("/v1/chat/completions", plain.chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
