"""Signs of life for a client that waits, and an end for one that does not read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import psutil
import pytest

from app.credential import new_key
from tests.checklist import lines, rows
from tests.conftest import MODEL_ID
from tests.fleet import fake_binary
from tests.inprocess import Client, InProcess, gateway_in_process

HELLO: list[dict[str, str]] = [{"role": "user", "content": "Hi."}]


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, folder: Path, model: Path, switches: dict[str, Any], **fields: Any
) -> AsyncIterator[InProcess]:
    """A gateway over the fake engine, with a pulse that tests can wait for."""
    monkeypatch.setenv("FAKE_SWITCHES", str(folder))
    (folder / f"{MODEL_ID}.json").write_text(json.dumps(switches))
    async with gateway_in_process(str(fake_binary(folder)), model, folder, context=4096, **fields) as running:
        running.gateway.proxy.patience.pulse_seconds = 0.1
        yield running


@lines(103)
@pytest.mark.slow
async def test_a_queued_stream_hears_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path
) -> None:
    async with served(monkeypatch, tmp_path, demo_model, {"chunks": 40, "chunk_interval_seconds": 0.02}) as running:
        first = await running.send(messages=HELLO, stream=True)
        await first.until(b"data: ")
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model=MODEL_ID, messages=HELLO, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        second = await running.send(messages=HELLO, stream=True)
        third = await running.send(messages=HELLO, stream=True)
        received = await third.until(b"[DONE]\n\n")
        for one in (first, second, third):
            await one.close()
    assert text
    assert received.count(b": keep-alive\n\n") >= 2
    assert received.count(b"HTTP/1.1 200 ") == 1
    assert received.rindex(b": keep-alive") < received.index(b"data: ")


async def test_signs_of_life_before_a_message_of_anthropics_api(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path
) -> None:
    switches = {"chunks": 4, "silence_seconds": 0.5}
    body = {"model": MODEL_ID, "max_tokens": 100, "messages": HELLO, "stream": True}
    async with served(monkeypatch, tmp_path, demo_model, switches) as running:
        url = f"http://127.0.0.1:{running.port}"
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="none") as client,
            client.messages.stream(model=MODEL_ID, max_tokens=100, messages=HELLO) as stream,
        ):
            message = await stream.get_final_message()
        async with httpx.AsyncClient() as raw:
            received = (await raw.post(f"{url}/v1/messages", json=body)).content
    assert message.stop_reason == "end_turn"
    assert received.startswith(b": keep-alive\n\n")
    assert received.rindex(b": keep-alive") < received.index(b"event: message_start")


@lines(103)
async def test_an_error_after_a_sign_of_life_is_an_event(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path
) -> None:
    switches = {"chunks": 40, "chunk_interval_seconds": 0.02, "error_event": 30}
    async with served(monkeypatch, tmp_path, demo_model, switches) as running:
        first = await running.send(messages=HELLO, stream=True)
        await first.until(b"data: ")
        second = await running.send(messages=HELLO, stream=True)
        await second.until(b": keep-alive\n\n")
        received = await second.rest()
        await first.close()
        await second.close()
    last = [line for line in received.split(b"\n") if line.startswith(b"data: ")][-1]
    assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "server_is_overloaded"
    assert b"[DONE]" not in received


async def test_a_key_may_do_without_signs_of_life(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path
) -> None:
    key, hashed = new_key()
    keys = [{"name": "brittle", "hash": hashed, "comments": False}]
    switches = {"chunks": 40, "chunk_interval_seconds": 0.02}
    async with served(monkeypatch, tmp_path, demo_model, switches, settings={"keys": keys}) as running:
        first = await running.send(key=key, messages=HELLO, stream=True)
        await first.until(b"data: ")
        second = await running.send(key=key, messages=HELLO, stream=True)
        received = await second.until(b"[DONE]\n\n")
        await first.close()
        await second.close()
    assert b"keep-alive\n\n" not in received


@rows(51)
@lines(109)
async def test_a_client_that_does_not_read_is_let_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path
) -> None:
    # 128 MiB for the one that does not read; the other reads it all the while.
    switches = {"chunks": 2000, "content": "x" * 65536}
    async with served(monkeypatch, tmp_path, demo_model, switches, parallel=2) as running:
        running.gateway.proxy.patience.stall_seconds = 0.5
        before = psutil.Process().memory_info().rss
        deaf = await deaf_client(running)
        other = await running.send(messages=HELLO, stream=True)
        await other.until(b"data: ")
        async with asyncio.timeout(10):
            while running.gateway.scheduler.in_flight(MODEL_ID) == 2:
                await other.reader.read(1 << 20)
        grown = psutil.Process().memory_info().rss - before
        await deaf.close()
        await other.close()
    assert grown < 32 << 20


@lines(109)
async def test_a_client_that_reads_by_fits_and_starts_gets_every_byte_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_model: Path
) -> None:
    """What goes straight through must not overtake what had to wait."""
    deltas = [{"content": f"{number} " * 4000} for number in range(3000)]
    switches = {"chunks": 3000, "tool_deltas": deltas, "digests": str(tmp_path / "digests")}
    body = {"model": MODEL_ID, "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    received, sha = 0, hashlib.sha256()
    async with served(monkeypatch, tmp_path, demo_model, switches) as running, httpx.AsyncClient() as client:
        running.gateway.proxy.patience.pulse_seconds = 60
        url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
        async with client.stream("POST", url, json=body | {"ignore_eos": True}, timeout=60) as response:
            async for part in response.aiter_raw():
                sha.update(part)
                if received >> 22 != (received := received + len(part)) >> 22:
                    await asyncio.sleep(0.05)
        sent = (tmp_path / "digests").read_text().split()
    assert received > 16 << 20
    assert sha.hexdigest() == sent[-1]


async def deaf_client(running: InProcess) -> Client:
    """A client with a small window that never reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", running.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    client = Client(reader, writer)
    writer.transport.pause_reading()
    await running.send_on(client, messages=HELLO, stream=True)
    return client
