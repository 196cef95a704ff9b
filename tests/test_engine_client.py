"""The client of our own engines: kept connections, and every way in which an answer may come, or not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.client import EngineClient
from app.engine.connection import BrokenOff, Connection
from app.engine.endpoint import Endpoint

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = CHUNKED + b"6\r\ndata: \r\n3\r\n{}\n\r\n0\r\n\r\n"


class Server:
    """Gives each request the next of ``answers``; of one in parts the others are written when it is told to go on."""

    def __init__(self, *answers: bytes | tuple[bytes, bytes], closes: bool = False) -> None:
        self.answers = list(answers)
        self.closes = closes
        self.requests: list[bytes] = []
        self.connections = 0
        self.goes_on = asyncio.Event()
        self.left = asyncio.Event()
        self.handlers: set[asyncio.Task[None]] = set()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.handlers.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length")), 0)
                self.requests.append(head + await reader.readexactly(length))
                await self._answer(writer)
                if self.closes:
                    break
            else:
                await reader.read()
        self.left.set()
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        answer = self.answers.pop(0)
        first, rest = (answer, b"") if isinstance(answer, bytes) else answer
        writer.write(first)
        if rest:
            await self.goes_on.wait()
            writer.write(rest)


@asynccontextmanager
async def asking(server: Server, folder: Path) -> AsyncIterator[EngineClient]:
    path = folder / "e.sock"
    async with await asyncio.start_unix_server(server.connected, path):
        client = EngineClient(Endpoint(socket=path), api_key="secret")
        try:
            yield client
        finally:
            client.close()
            server.goes_on.set()
            await asyncio.gather(*server.handlers)


async def test_a_request_has_what_an_engine_needs_and_its_connection_is_used_again(tmp_path: Path) -> None:
    server = Server(WHOLE, STREAM, WHOLE)
    async with asking(server, tmp_path) as client:
        assert await (await client.post("/a", b"{}", {"traceparent": "00-1"})).read_all() == b"hello"
        assert await (await client.post("/b", b"")).read_all() == b"data: {}\n"
        response = await client.get("/c")
        assert (response.status, await response.read_all(), response.at_eof()) == (200, b"hello", True)
    first, _, last = server.requests
    assert first.startswith(b"POST /a HTTP/1.1\r\n")
    assert first.endswith(b"\r\n\r\n{}")
    assert b"authorization: Bearer secret\r\n" in first
    assert b"traceparent: 00-1\r\n" in first
    assert last.startswith(b"GET /c HTTP/1.1\r\n")
    assert server.connections == 1


async def test_requests_at_the_same_time_have_connections_of_their_own(tmp_path: Path) -> None:
    server = Server((CHUNKED, b"0\r\n\r\n"), WHOLE)
    async with asking(server, tmp_path) as client:
        first = await client.get("/")
        second = await client.get("/")
        assert await second.read_all() == b"hello"
        server.goes_on.set()
        assert await first.read_all() == b""
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello", b"hello"),
        # Without a length the end of the connection ends it.
        (b"HTTP/1.1 200 OK\r\n\r\nhello", b"hello"),
    ],
)
async def test_an_answer_is_whole(tmp_path: Path, answer: bytes, body: bytes) -> None:
    async with asking(Server(answer, closes=True), tmp_path) as client:
        assert await (await client.get("/")).read_all() == body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (65 << 10),
    ],
)
async def test_an_answer_that_does_not_begin(tmp_path: Path, answer: bytes) -> None:
    async with asking(Server(answer, closes=True), tmp_path) as client:
        with pytest.raises(BrokenOff):
            await client.get("/")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        CHUNKED + b"5\r\nhello\r\n",
        CHUNKED + b"5\r\nhello\r\nzz\r\n",
    ],
)
async def test_an_answer_that_breaks_off_gives_what_came_and_then_says_so(tmp_path: Path, answer: bytes) -> None:
    async with asking(Server(answer, closes=True), tmp_path) as client:
        response = await client.get("/")
        assert await response.read() == b"hello"
        with pytest.raises(BrokenOff):
            await response.read()


async def test_a_connection_that_the_engine_has_closed_is_not_used_again(tmp_path: Path) -> None:
    server = Server(WHOLE, WHOLE, closes=True)
    async with asking(server, tmp_path) as client:
        await (await client.get("/")).read_all()
        await server.left.wait()
        await asyncio.sleep(0)
        # Its end may be noticed late: then the request fails before anything has come, and may be sent again.
        try:
            response = await client.get("/")
        except OSError:
            response = await client.get("/")
        assert await response.read_all() == b"hello"
        assert server.connections == 2


async def test_a_connection_that_was_idle_too_long_is_closed_by_us(tmp_path: Path) -> None:
    server = Server(WHOLE, WHOLE)
    async with asking(server, tmp_path) as client:
        client.kept_seconds = 0.05
        await (await client.get("/")).read_all()
        await asyncio.wait_for(server.left.wait(), 5)


async def test_letting_go_of_an_answer_closes_its_connection(tmp_path: Path) -> None:
    server = Server((CHUNKED + b"5\r\nhello\r\n", b"5\r\nthere\r\n"))
    async with asking(server, tmp_path) as client:
        response = await client.get("/")
        assert await response.read() == b"hello"
        response.close()
        server.goes_on.set()
        await asyncio.wait_for(server.left.wait(), 5)
        with pytest.raises(BrokenOff):
            await response.read()


async def test_who_stops_waiting_for_the_head_closes_the_connection(tmp_path: Path) -> None:
    server = Server((b"", WHOLE))
    async with asking(server, tmp_path) as client:
        asked = asyncio.create_task(client.get("/"))
        while not server.requests:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        server.goes_on.set()
        await asyncio.wait_for(server.left.wait(), 5)


async def test_closing_the_client_ends_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    async with asking(Server((CHUNKED, b"0\r\n\r\n")), tmp_path) as client:
        response = await client.get("/")
        client.close()
        with pytest.raises(BrokenOff):
            await response.read()
        with pytest.raises(ConnectionError):
            await client.get("/")


async def test_an_engine_waits_for_a_reader_who_does_not_read(tmp_path: Path) -> None:
    total = 64 << 20
    server = Server(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total + bytes(total), WHOLE)
    async with asking(server, tmp_path) as client:
        response = await client.get("/")
        for _ in range(100):
            await asyncio.sleep(0.001)
        # What the kernel reads at once comes on top of the bound.
        waiting = len(response.read_nowait())
        assert 0 < waiting < 2 << 20
        assert waiting + len(await response.read_all()) == total
        # It goes on with the next.
        assert await (await client.get("/")).read_all() == b"hello"
        assert server.connections == 1


async def test_pieces_go_to_the_sink_only_while_a_reader_waits() -> None:
    """What the sink does not take is read in order, and nothing overtakes what the reader has in hand."""
    loop = asyncio.get_running_loop()
    connection, _ = _connection(loop, lambda _: None)
    response, taken, refused = connection.send(b"", b""), list[bytes](), {b"3"}

    def sink(part: bytes) -> bool:
        if part not in refused:
            taken.append(part)
        return part not in refused

    def arrive(*parts: bytes) -> None:
        connection.data_received(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))

    connection.data_received(CHUNKED)
    await response.head()
    response.hand_to(sink)
    arrive(b"0")
    assert await response.read() == b"0"
    arrive(b"1")
    assert await response.read() == b"1"
    reading = asyncio.create_task(response.read())
    await asyncio.sleep(0)
    arrive(b"2")
    arrive(b"3", b"4")
    arrive(b"5")
    assert await reading == b"345"
    connection.data_received(b"0\r\n\r\n")
    assert await response.read() == b""
    assert taken == [b"2"]


class _Sink(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def writelines(self, list_of_data: object) -> None:
        pass

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def _connection(loop: asyncio.AbstractEventLoop, on_idle: Callable[[Connection], None]) -> tuple[Connection, _Sink]:
    connection, sink = Connection(loop, on_idle=on_idle, on_lost=on_idle), _Sink()
    connection.connection_made(sink)
    return connection, sink


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), max_size=60))
def test_any_segmentation_gives_the_same_bytes(parts: list[bytes], cuts: list[int]) -> None:
    answer = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    loop, idle = asyncio.new_event_loop(), list[Connection]()
    try:
        connection, _ = _connection(loop, idle.append)
        response, at = connection.send(b"", b""), 0
        for cut in cuts:
            if at < len(answer):
                connection.data_received(answer[at : at + cut])
                at += cut
        if at < len(answer):
            connection.data_received(answer[at:])
        assert response.read_nowait() == b"".join(parts)
        assert response.at_eof()
        assert idle == [connection]
    finally:
        loop.close()


def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    loop = asyncio.new_event_loop()
    try:
        connection, sink = _connection(loop, lambda _: None)
        connection.data_received(WHOLE)
        assert sink.is_closed
        assert not connection.is_open
    finally:
        loop.close()
