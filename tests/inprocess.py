"""A whole gateway inside the test's own loop, so that its tasks, leases and engine can be looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.api import Gateway
from app.config import Settings
from app.engine.binary import find_engine
from app.main import Server, StopRequest, bind, open_gateway
from tests.conftest import MODEL_ID


@dataclass(frozen=True)
class InProcess:
    """``gateway`` serves on ``port`` of 127.0.0.1."""

    gateway: Gateway
    port: int

    @property
    def backend(self) -> Any:
        return self.gateway.supervisor.backend(self.gateway.catalog.resolve(MODEL_ID))

    async def send(self, **fields: Any) -> Client:
        """Send one chat request on a connection of its own."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        await self.send_on(client, **fields)
        return client

    async def send_on(self, client: Client, *, key: str = "none", **fields: Any) -> None:
        """Send one chat request on an open connection."""
        body = orjson.dumps({"model": MODEL_ID, "ignore_eos": True} | fields)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        client.writer.write(head.encode() + body)
        await client.writer.drain()


@dataclass(frozen=True)
class Client:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def until(self, mark: bytes) -> bytes:
        """Read until ``mark`` has come; raises IncompleteReadError at the end."""
        return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Everything until the connection ends."""
        return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def gateway_in_process(
    engine: str, model: Path, folder: Path, *, settings: Mapping[str, Any] | None = None, **model_fields: Any
) -> AsyncIterator[InProcess]:
    """Serve ``model`` until the block ends; ``settings`` are further sections of the configuration."""
    configuration = Settings.model_validate(
        {
            "server": {"port": 0, "drain_seconds": 1},
            "memory": {"ram_reserve": "256MiB"},
            "models": {MODEL_ID: {"path": model} | model_fields},
            "state_dir": folder,
            **(settings or {}),
        }
    )
    binary = await asyncio.to_thread(find_engine, engine)
    with bind(configuration) as listener:
        async with open_gateway(configuration, binary) as gateway:
            server = Server(gateway)
            stop = StopRequest()
            serving = asyncio.create_task(server.serve_until(stop, listener))
            await server.started_event.wait()
            try:
                await gateway.supervisor.ready(gateway.catalog.resolve(MODEL_ID))
                yield InProcess(gateway, listener.getsockname()[1])
            finally:
                stop.ask()
                await serving
