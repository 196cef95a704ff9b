"""A cheap HTTP/1.1 client on raw sockets: it keeps the bytes as they came and looks at them when all is over."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast


class BadAnswer(Exception):
    """The answer is not what the engine sent."""


@dataclass(slots=True)
class Meter:
    """Events seen so far over all streams."""

    events: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole answer; the times are those of time.monotonic (uvloop's own clock counts whole milliseconds)."""

    sent_at: float
    first_at: float
    done_at: float
    raw: bytes

    def status(self) -> int:
        return int(self.raw[9:12])

    def body(self) -> bytes:
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        return dechunk(rest) if b"transfer-encoding: chunked" in head.lower() else rest

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream before [DONE]; raises BadAnswer when it is none or has no such end."""
        if self.status() != 200:
            raise BadAnswer(f"status {self.status()}: {self.body()[:300]!r}")
        lines = [line[6:] for line in self.body().split(b"\n") if line.startswith(b"data: ")]
        if not lines or lines.pop() != b"[DONE]":
            raise BadAnswer(f"no [DONE] after {len(lines)} events")
        return [json.loads(line) for line in lines]


def text_of(events: Sequence[Mapping[str, Any]]) -> str:
    """The content of all deltas."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def dechunk(data: bytes) -> bytes:
    """The body inside HTTP's chunked coding; raises BadAnswer when it is cut."""
    pieces: list[bytes] = []
    place = 0
    while True:
        end = data.find(b"\r\n", place)
        if end < 0:
            raise BadAnswer("the chunked body is cut")
        size = int(data[place:end].partition(b";")[0], 16)
        if size == 0:
            return b"".join(pieces)
        pieces.append(data[end + 2 : end + 2 + size])
        place = end + 2 + size + 2


class Client(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._reset()

    def _reset(self) -> None:
        self._reads: list[bytes] = []
        self._tail = b""
        self._length: int | None = None  # of head and body, when the answer says it
        self._sent_at = self._first_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def request(self, content: bytes, *, sent_at: float | None = None) -> Reply:
        """Raises ConnectionError when the connection ends before the answer does."""
        assert self._transport is not None
        self._reset()
        self._sent_at = time.monotonic() if sent_at is None else sent_at
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: ")
        self._meter.events += events
        if not self._first_at and (events or not self._is_stream(data)):
            self._first_at = time.monotonic()
        self._reads.append(data)
        self._tail = (self._tail + data)[-7:]
        if self._length is None and len(self._reads) < 4:
            self._length = self._announced_length()
        if self._tail == b"\r\n0\r\n\r\n" or (self._length and sum(map(len, self._reads)) >= self._length):
            self._finish()

    def _is_stream(self, data: bytes) -> bool:
        return b"text/event-stream" in (self._reads[0] if self._reads else data)

    def _announced_length(self) -> int | None:
        head, found, _ = b"".join(self._reads).partition(b"\r\n\r\n")
        _, announced, value = head.lower().partition(b"\r\ncontent-length:")
        return len(head) + 4 + int(value.split(b"\r\n")[0]) if found and announced else None

    def _finish(self) -> None:
        if self._answer and not self._answer.done():
            raw = b"".join(self._reads)
            self._answer.set_result(Reply(self._sent_at, self._first_at, time.monotonic(), raw))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed before the end of the answer"))


AnyClient = TypeVar("AnyClient", bound=Client)


async def connect(address: int | str, meter: Meter) -> Client:
    """A loopback port, or the path of a Unix socket."""
    return await connected(Client(meter), address)


async def connected(client: AnyClient, address: int | str) -> AnyClient:
    """The same for a client of any kind."""
    loop = asyncio.get_running_loop()
    if isinstance(address, int):
        return (await loop.create_connection(lambda: client, "127.0.0.1", address))[1]
    return (await loop.create_unix_connection(lambda: client, address))[1]


def render_request(body: Mapping[str, object], headers: Mapping[str, str]) -> bytes:
    """A chat completion as bytes."""
    content = json.dumps(body).encode()
    fields = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": len(content), **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + content
