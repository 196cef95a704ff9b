"""Read a JSON body within bounds."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from app.errors import BodyTooLarge, RequestTimeout, UnsupportedMediaType

_IDLE_SECONDS = 60.0
# Clients that forget the header send curl's default or none at all; what they mean is plain.
_JSON_TYPES = frozenset({"", "application/json", "text/plain", "text/json"})


async def read_json_body(request: Request, *, limit_bytes: int, idle_seconds: float = _IDLE_SECONDS) -> bytes:
    """The body; raises BodyTooLarge, UnsupportedMediaType or RequestTimeout.

    A body whose announced length is over the limit is refused before it is read.
    """
    _check_type(request)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size_bytes = 0
    while True:
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
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


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
