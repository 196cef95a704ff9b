"""Read a body within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect, Request

from app.errors import BodyTooLarge, RequestTimeout, UnsupportedMediaType

_IDLE_SECONDS = 60.0
# Clients that forget the header send curl's default or none at all; what they mean is plain.
_JSON_TYPES = frozenset({"", "application/json", "text/plain", "text/json"})


async def read_json_body(request: Request, *, limit_bytes: int, idle_seconds: float = _IDLE_SECONDS) -> bytes:
    """A JSON body; raises BodyTooLarge, UnsupportedMediaType or RequestTimeout.

    A body whose announced length is over the limit is refused before it is read.
    """
    _check_type(request)
    parts = parts_of_body(request, limit_bytes=limit_bytes, idle_seconds=idle_seconds)
    return b"".join([part async for part in parts])


async def parts_of_body(
    request: Request, *, limit_bytes: int, idle_seconds: float = _IDLE_SECONDS
) -> AsyncGenerator[bytes, None]:
    """The body as it comes; raises BodyTooLarge or RequestTimeout."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    size_bytes, more = 0, True
    while more:
        try:
            async with asyncio.timeout(idle_seconds):
                message = await request.receive()
        except TimeoutError:
            raise RequestTimeout(f"The body did not arrive: nothing came for {idle_seconds:.0f} s.") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        yield part
        more = message.get("more_body", False)


def _check_type(request: Request) -> None:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Compressed bodies are not accepted; send the JSON as it is.")
    media, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    if media.strip() not in _JSON_TYPES:
        raise UnsupportedMediaType("Send 'Content-Type: application/json' with a JSON object.")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "')
    if charset and charset not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("JSON must be sent in UTF-8.")


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over {limit_bytes} bytes, the limit of this gateway (server.max_body).")
