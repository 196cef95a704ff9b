"""Input that is made to hurt: the right status, in a fifth of a second, from a gateway whose engine lives on.

Two keys in one request are in test_auth.py.
"""

from __future__ import annotations

import gzip
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import orjson
import psutil
import pytest

from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess

# The work of the gateway for it, which other programs on the machine do not change.
_MOST_CPU_SECONDS = 0.2
_PATH = "/v1/chat/completions"


def _body(**fields: object) -> bytes:
    return orjson.dumps({"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1} | fields)


def _holding(content: bytes) -> bytes:
    return _body(messages=[{"role": "user", "content": "@"}]).replace(b'"@"', content)


def _post(body: bytes, *lines: bytes) -> bytes:
    length = b"content-length: %d" % len(body)
    head = [b"POST " + _PATH.encode() + b" HTTP/1.1", b"host: 127.0.0.1", b"content-type: application/json"]
    return b"\r\n".join([*head, b"connection: close", *lines, *([] if lines[-1:] == [b""] else [length]), b"", body])


def _deep(levels: int) -> bytes:
    schema = b'{"properties":{"a":' * levels + b"{}" + b"}}" * levels
    format_ = b'{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + b"}}"
    return _body(response_format="@").replace(b'"@"', format_)


_KEYS = {f"key{index}": index for index in range(50_000)}
_INPUTS = {
    "an array 100,000 deep": (_post(_holding(b"[" * 100_000 + b"]" * 100_000)), 400),
    "an object 100,000 deep": (_post(_holding(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)), 400),
    "nothing but brackets": (_post(b"[" * 100_000), 400),
    "50,000 keys": (_post(_body(**_KEYS)), 200),
    "50,000 keys in a message": (_post(_body(messages=[{"role": "user", "content": "Hi."} | _KEYS])), 400),
    "50,000 keys in a schema": (_post(_body(response_format={"type": "json_object"} | _KEYS)), 400),
    "a schema 20,000 deep": (_post(_deep(20_000)), 400),
    "1e400": (_post(_body(temperature="@").replace(b'"@"', b"1e400")), 400),
    "NaN": (_post(_body(temperature="@").replace(b'"@"', b"NaN")), 400),
    "a lone surrogate": (_post(_holding(rb'"\ud800"')), 400),
    "half a character": (_post(_holding(b'"\xf0\x9f\x98"')), 400),
    "a BOM": (_post(b"\xef\xbb\xbf" + _body()), 200),
    "a gzip body": (_post(gzip.compress(_body()), b"content-encoding: gzip"), 415),
    "a gzip body of 1 GiB": (_post(b"\x1f\x8b\x08" + b"\x00" * 1_000_000, b"content-encoding: gzip"), 415),
    "length and chunks": (_post(_body(), b"transfer-encoding: chunked"), 400),
    "two lengths": (_post(_body(), b"content-length: 3"), 400),
    "a length with a sign": (_post(_body(), b"content-length: +3", b""), 400),
    "unknown encoding": (_post(_body(), b"transfer-encoding: xchunked"), 400),
    "a folded line": (_post(_body(), b"x: a\r\n  b"), 400),
}


@pytest.fixture(scope="module")
def served(gateway: GatewayProcess) -> GatewayProcess:
    """With the model loaded."""
    assert _answer(gateway, _post(_body())).startswith(b"HTTP/1.1 200")
    return gateway


@pytest.mark.parametrize(("request_", "status"), _INPUTS.values(), ids=_INPUTS)
def test_it_is_answered_quickly_and_hurts_nobody(served: GatewayProcess, request_: bytes, status: int) -> None:
    engines, before = served.engine_pids(), _cpu_seconds(served)
    answer = _answer(served, request_)
    used = _cpu_seconds(served) - before
    assert answer.split(b" ", 2)[1] == str(status).encode(), answer[:500]
    assert used <= _MOST_CPU_SECONDS
    assert served.engine_pids() == engines
    assert _answer(served, _post(_body())).startswith(b"HTTP/1.1 200")


def _cpu_seconds(gateway: GatewayProcess) -> float:
    times = psutil.Process(gateway.pid).cpu_times()
    return float(times.user + times.system)


def _answer(gateway: GatewayProcess, request_: bytes) -> bytes:
    """All that comes; a server that has refused need not read the rest."""
    address = urlsplit(gateway.url)
    answer = b""
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        with suppress(OSError):
            connection.sendall(request_)
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    return answer
