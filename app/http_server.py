"""uvicorn's HTTP protocol with what it lacks at the door of a public service: bounds and a deadline for the head of a
request, errors in the shape of the API, whole answers for HTTP/1.0, and a disconnect that pipelining does not hide.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.errors import GatewayError, RequestError, RequestTimeout
from app.protocol.messages import error_document, is_messages_path
from app.proxy.outlet import WRITE_NOW

MAX_HEAD_BYTES = 64 << 10
MAX_URL_BYTES = 8 << 10


class HeadTooLarge(RequestError):
    """The headers are over MAX_HEAD_BYTES."""

    status = 431
    code = "headers_too_large"


class UrlTooLong(RequestError):
    """The URL is over MAX_URL_BYTES."""

    status = 414
    code = "url_too_long"


class _UntilClose(int):
    """A content length that the end of the connection tells: never exceeded and never short."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClose:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class _HeadJoiner:
    """A transport that sends the head of an answer together with what follows it in the same turn of the loop.

    uvicorn writes them apart, and a write costs more than everything that it carries.
    """

    __slots__ = (
        "_held",
        "_loop",
        "_transport",
        "close",
        "get_extra_info",
        "is_closing",
        "pause_reading",
        "resume_reading",
        "set_protocol",
    )

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.set_protocol = transport.set_protocol
        self.close = self._close

    def write(self, data: bytes) -> None:
        """Send it, or hold it back until the end of this turn if it is a head."""
        if self._held:
            data, self._held = self._held + data, b""
            self._transport.write(data)
        elif data.startswith(b"HTTP/1.1 2"):
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)

    def _close(self) -> None:
        self._flush()
        self._transport.close()


class _PartWriter:
    """Writes a part of a stream past the layers of ASGI, each of which would cost as much as looking at the part."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def __call__(self, part: bytes) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True


class GatewayProtocol(HttpToolsProtocol):
    """One connection. Its head state is written by the parser's callbacks, which run on the loop's thread."""

    head_seconds = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: RequestResponseCycle | None = None
        self.url = b""
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected; its first request must come in time."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport = _HeadJoiner(self.transport, self.loop)  # type: ignore[assignment]
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: tell the request that runs, not only the last one that was read."""
        self._disarm()
        if self._running is not None and self._is_answering():
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadTooLarge(f"The head of the request is over {MAX_HEAD_BYTES} bytes."))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """The head is whole: its deadline is met."""
        self._in_head = False
        self._disarm()
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(UrlTooLong(f"The URL is over {MAX_URL_BYTES} bytes."))
            return
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            # It came in one piece, before its bytes could be counted.
            self._refuse(HeadTooLarge(f"The head of the request is over {MAX_HEAD_BYTES} bytes."))
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            # Such a client does not know chunks: the answer ends where the connection does.
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClose()

    def on_body(self, body: bytes) -> None:
        """A part of the body, unless its request has been refused."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of the request, unless it has been refused."""
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP request, or one that could be read in two ways."""
        self._refuse(RequestError("This is not a valid HTTP/1.1 request."))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["extensions"] = {WRITE_NOW: _PartWriter(cycle)}  # type: ignore[dict-item]
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._disarm()
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._is_answering():
            # A request sent behind one that still runs waits for its turn anyway.
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)
            return
        self._refuse(RequestTimeout(f"The head of the request did not arrive within {self.head_seconds:.0f} s."))

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _error_document(self, error: GatewayError) -> dict[str, Any]:
        """In the shape of the API that was asked, as far as its path has come."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        return error_document(error) if is_messages_path(path) else error.body()

    def _refuse(self, error: GatewayError) -> None:
        """Answer without the application, and close; into an answer that still runs nothing may be written."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self._running is not None and self._is_answering():
            # What it still wants to send goes nowhere.
            self._running.disconnected = True
            self._running.message_event.set()
            if self._running.response_started:
                self.transport.close()
                return
        body = orjson.dumps(self._error_document(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": uuid.uuid4().hex,
            **error.headers(),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self.transport.close()
