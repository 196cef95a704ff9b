"""Every line of the compliance checklist has its test; those that no other file has are here."""

from __future__ import annotations

import ast
import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from starlette.requests import Request

from app.api import body as body_reader
from app.credential import new_key
from app.errors import RequestTimeout
from tests.checklist import lines, rows
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway, wait_until

_HERE = Path(__file__).parent
_ALL = set(range(1, 118))
HELLO: dict[str, Any] = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}


def _lines_with_tests() -> Iterator[int]:
    for file in _HERE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "lines":
                        yield from (ast.literal_eval(number) for number in mark.args)


def test_every_line_has_a_test() -> None:
    assert set(_lines_with_tests()) == _ALL


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=300) as client:
        yield client


def _code(answer: httpx.Response) -> tuple[int, Any]:
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return answer.status_code, error["code"]


def _raw(gateway: GatewayProcess, request: bytes) -> socket.socket:
    address = urlsplit(gateway.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    connection.sendall(request)
    return connection


def _everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def _post(body: bytes, *headers: str) -> bytes:
    head = ["POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


@lines(14)
def test_what_follows_a_nul_is_counted_and_read(client: httpx.Client) -> None:
    def prompt_tokens(content: str) -> int:
        body = HELLO | {"messages": [{"role": "user", "content": content}]}
        return int(client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    assert prompt_tokens("a\x00 b c d e f") >= prompt_tokens("a\x00") + 5


@lines(23)
def test_a_trailing_slash_is_no_other_path(client: httpx.Client) -> None:
    assert client.get("/v1/models/", follow_redirects=False).json() == client.get("/v1/models").json()
    assert client.post("/v1/chat/completions/", json=HELLO, follow_redirects=False).status_code == 200


@lines(25)
def test_an_escaped_letter_is_that_letter(client: httpx.Client) -> None:
    assert client.post("/v1/%63hat/completions", json=HELLO).status_code == 200


@lines(29)
def test_a_body_in_chunks(client: httpx.Client) -> None:
    body = orjson.dumps(HELLO)
    answer = client.post(
        "/v1/chat/completions",
        content=iter([body[:9], body[9:10], body[10:]]),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 200


@lines(40)
def test_a_websocket_is_not_spoken(gateway: GatewayProcess) -> None:
    upgrade = "GET /v1/realtime HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    key = "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    with _raw(gateway, (upgrade + key).encode()) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = _everything(connection)
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"unknown_url" in answer


@lines(37)
def test_a_client_that_asks_before_it_sends(gateway: GatewayProcess, demo_model: Path, tmp_path: Path) -> None:
    body = orjson.dumps(HELLO)
    with _raw(gateway, _post(body, "expect: 100-continue", "connection: close")) as connection:
        answer = _everything(connection)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    key = {"name": "alice", "hash": new_key()[1]}
    config = {"models": {MODEL_ID: {"path": str(demo_model)}}, "keys": [key]}
    with (
        running_gateway(config, tmp_path) as locked,
        _raw(locked, _post(b"", "expect: 100-continue")) as connection,
    ):
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


@lines(41)
async def test_a_body_that_does_not_come() -> None:
    """The deadline is a minute; the reader is given one that has passed."""
    parts = iter([{"type": "http.request", "body": b'{"half', "more_body": True}])

    async def receive() -> Any:
        part = next(parts, None)
        return part or await _never()

    request = Request({"type": "http", "method": "POST", "headers": [], "path": "/"}, receive)
    with pytest.raises(RequestTimeout) as caught:
        await body_reader.read_json_body(request, limit_bytes=100, idle_seconds=0.01)
    assert caught.value.status == 408


async def _never() -> Any:
    await asyncio.Event().wait()


_OTHERS_HEADERS = {
    "authorization": "Bearer of-the-client",
    "cookie": "session=1",
    "x-conversation-id": "shared",
    "x-forwarded-for": "203.0.113.9",
    "x-forwarded-host": "evil.example",
    "x-api-key": "of-the-client",
    "te": "trailers",
    "x-anything": "else",
}
_OWN_HEADERS = {
    *("accept", "accept-encoding", "authorization", "content-length", "content-type", "host", "user-agent"),
}


@lines(42, 117)
def test_no_header_of_a_client_reaches_the_engine(demo_model: Path, tmp_path: Path) -> None:
    headers = {name: value for name, value in _OTHERS_HEADERS.items() if name != "x-api-key"}
    [came] = _headers_at_the_engine(demo_model, tmp_path, headers)
    assert came.keys() <= _OWN_HEADERS
    assert "of-the-client" not in came["authorization"]


def test_a_trace_reaches_the_engine_and_nothing_else_of_its_head(demo_model: Path, tmp_path: Path) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
    with_trace, junk = _headers_at_the_engine(demo_model, tmp_path, trace, trace | {"traceparent": "00-junk-01"})
    assert {name: with_trace.pop(name) for name in trace} == trace
    assert with_trace.keys() == junk.keys() <= _OWN_HEADERS


def _headers_at_the_engine(demo_model: Path, folder: Path, *heads: dict[str, str]) -> list[dict[str, str]]:
    """What the engine is sent for a request with each of these heads."""
    config = {"engine": {"binary": str(fake_binary(folder))}, "models": {MODEL_ID: {"path": str(demo_model)}}}
    (folder / f"{MODEL_ID}.json").write_text('{"log_headers": true}')
    with running_gateway(config, folder, environment={"FAKE_SWITCHES": str(folder)}) as running:
        for head in heads:
            assert httpx.post(running.url + "/v1/chat/completions", json=HELLO, headers=head).status_code == 200
        log = httpx.get(running.url + f"/admin/models/{MODEL_ID}/logs").json()["lines"]
    came = (line.partition("POST /v1/chat/completions came with ")[2] for line in log)
    return [orjson.loads(found) for found in came if found]


@rows(53)
@lines(108)
def test_a_client_that_closes_half_is_gone(gateway: GatewayProcess, client: httpx.Client) -> None:
    """llama-server reads it so too; documented in README."""
    body = orjson.dumps(HELLO | {"max_tokens": 900, "stream": True, "ignore_eos": True})
    with _raw(gateway, _post(body)) as connection:
        first = connection.recv(65536)
        connection.shutdown(socket.SHUT_WR)
        answer = first + _everything(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in answer
    idle = f'llama_gateway_slots{{model="{MODEL_ID}",state="busy"}} 0.0'
    wait_until(lambda: idle in client.get("/metrics").text, seconds=10, what="the slot is idle")


@lines(111)
@pytest.mark.slow
def test_a_connection_that_the_engine_has_closed_in_silence_is_not_met(client: httpx.Client) -> None:
    """It does so after 5 s; the time that this takes is the engine's own."""
    assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
    time.sleep(5.1)
    assert client.post("/v1/chat/completions", json=HELLO).status_code == 200


@lines(89)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_as_many_requests_of_full_size_as_slots(client: httpx.Client) -> None:
    def ask(number: int) -> int:
        messages = [{"role": "user", "content": f"{number} " + "word " * (CONTEXT_TOKENS - 60)}]
        count = client.post("/v1/chat/completions", json=HELLO | {"messages": messages, "max_tokens": CONTEXT_TOKENS})
        prompt = count.json()["error"]["n_prompt_tokens"]
        body = HELLO | {"messages": messages, "max_tokens": CONTEXT_TOKENS - prompt, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body)
        return int(answer.json()["usage"]["total_tokens"])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [CONTEXT_TOKENS] * 2
