"""The door: heads that are late, too large or ambiguous, HTTP/1.0, and clients that leave behind a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
import uvicorn

from app.api.error_answer import error_response
from app.errors import RequestTimeout
from app.http_server import MAX_HEAD_BYTES, MAX_URL_BYTES, GatewayProtocol
from tests.checklist import lines


class Impatient(GatewayProtocol):
    head_seconds = 0.2


@dataclass
class Application:
    """Answers ``/whole`` at once and ``/slow`` in parts until it is left, ``/late`` as one that has waited enough."""

    started: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        self.started.append(scope["path"])
        if scope["path"] == "/late":
            await error_response(scope, RequestTimeout("The body did not arrive."))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"part;", "more_body": True})
        if scope["path"] == "/slow":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


@asynccontextmanager
async def served(protocol: type[GatewayProtocol] = GatewayProtocol) -> AsyncIterator[tuple[Application, int]]:
    application = Application()
    config = uvicorn.Config(
        application, port=0, http=protocol, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield application, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def ask(port: int, request: bytes) -> bytes:
    """Everything that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: " in head
    assert b"connection: close" in head
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), error


async def test_a_whole_request_is_answered() -> None:
    async with served() as (_, port):
        answer = await ask(port, b"GET /whole HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"5\r\npart;\r\n3\r\nend\r\n0\r\n\r\n")


@pytest.mark.parametrize("sent", [b"", b"GET /whole HTTP/1.1\r\nhost: 127.0.0.1\r\n"])
async def test_a_late_head(sent: bytes) -> None:
    async with served(Impatient) as (application, port):
        assert refusal(await ask(port, sent))[0] == 408
    assert application.started == []


async def test_a_second_head_may_wait_behind_a_running_answer() -> None:
    async with served(Impatient) as (application, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /whole HTTP/1.1\r\nhost: ")
        await reader.readuntil(b"part;\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1000), 0.6)
        writer.close()
        async with asyncio.timeout(5):
            await application.left.wait()


async def test_leaving_behind_a_pipeline_is_noticed() -> None:
    async with served() as (application, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /slow HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" + b"GET /whole HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        )
        await reader.readuntil(b"part;\r\n")
        writer.close()
        async with asyncio.timeout(5):
            await application.left.wait()
    assert application.started == ["/slow"]


@lines(38)
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served() as (application, port):
        first = b"GET /one HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        answer = await ask(port, first + b"GET /two HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert application.started == ["/one", "/two"]


async def test_a_body_that_does_not_come_ends_the_connection() -> None:
    async with served() as (_, port):
        answer = await ask(port, b"POST /late HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
    assert answer.startswith(b"HTTP/1.1 408 ")
    # Said, and not left to the limit for idle connections.
    assert b"\r\nconnection: close\r\n" in answer


@lines(35)
async def test_a_large_head() -> None:
    async with served() as (application, port):
        many = b"".join(b"x-%d: %s\r\n" % (index, b"v" * 1000) for index in range(MAX_HEAD_BYTES // 1000 + 2))
        status, error = refusal(await ask(port, b"GET /whole HTTP/1.1\r\nhost: 127.0.0.1\r\n" + many))
    assert (status, error["code"]) == (431, "headers_too_large")
    assert application.started == []


@lines(35)
async def test_a_large_head_in_one_piece() -> None:
    async with served() as (application, port):
        head = b"GET /whole HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"v" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"
        status, error = refusal(await ask(port, head))
    assert (status, error["code"]) == (431, "headers_too_large")
    assert application.started == []


async def test_a_refusal_is_in_the_shape_of_the_api_that_was_asked() -> None:
    async with served() as (application, port):
        many = b"".join(b"x-%d: %s\r\n" % (index, b"v" * 1000) for index in range(MAX_HEAD_BYTES // 1000 + 2))
        large = await ask(port, b"POST /v1/messages?beta=true HTTP/1.1\r\nhost: x\r\n" + many)
        twofold = await ask(port, b"POST /v1/messages HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n")
    for answer, status in ((large, b"431"), (twofold, b"400")):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        document = orjson.loads(body)
        assert (document["type"], document["error"]["type"]) == ("error", "invalid_request_error")
    assert application.started == []


@lines(36)
async def test_a_long_url() -> None:
    async with served() as (application, port):
        request = b"GET /" + b"x" * MAX_URL_BYTES + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        status, error = refusal(await ask(port, request))
    assert (status, error["code"]) == (414, "url_too_long")
    assert application.started == []


AMBIGUOUS = [
    b"content-length: 2\r\ntransfer-encoding: chunked",
    b"content-length: 2\r\ncontent-length: 3",
    b"content-length: +2",
    b"transfer-encoding: xchunked",
    b"x: a\r\n  folded",
]


@pytest.mark.parametrize("head", AMBIGUOUS)
async def test_an_ambiguous_head(head: bytes) -> None:
    async with served() as (_, port):
        answer = await ask(port, b"POST /whole HTTP/1.1\r\nhost: 127.0.0.1\r\n" + head + b"\r\n\r\n{}")
    assert refusal(answer)[0] == 400


@lines(39)
async def test_http_1_0_gets_its_answer_without_chunks() -> None:
    async with served() as (_, port):
        answer = await ask(port, b"GET /whole HTTP/1.0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"part;end"
