"""Nonsense of every kind: refused in the right shape, quickly, by a gateway and an engine that live on.

``GATEWAY_TEST_FUZZ=5000`` runs so many bodies and half as many raw requests; CI runs a tenth.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, is_alive, running_gateway

_BODIES = int(os.environ.get("GATEWAY_TEST_FUZZ", "500"))
_PATHS = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/chat/completions/input_tokens"),
    *("/completion", "/infill", "/tokenize", "/detokenize", "/apply-template"),
)
_TYPED = (502, 503, 504)
_PATIENCE_SECONDS = 1.0

pytestmark = [pytest.mark.slow, pytest.mark.any_engine]


@pytest.fixture(scope="module")
def served(engine: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    models = {MODEL_ID: {"path": str(demo_model), "context": 512, "parallel": 2, "max_tokens_ceiling": 4}}
    config = {"engine": {"binary": engine}, "models": models, "memory": {"ram_reserve": "256MiB"}}
    with running_gateway(config, tmp_path_factory.mktemp("fuzz")) as running:
        httpx.post(running.url + _PATHS[0], json=_plain(), timeout=60).raise_for_status()
        yield running


def _plain() -> dict[str, Any]:
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}


_NUMBERS = (0, -1, 1, 2, 1.5, -0.0, 1e308, 1 << 31, (1 << 32) + 2, (1 << 63) - 1)
_TEXTS = ("", "x", "\x00", "北京🌍", "<|im_end|>", "{{ x }}", "data: [DONE]\n\n", "a" * 3000, MODEL_ID, "user", "auto")
_LEAVES: tuple[Any, ...] = (None, True, False, *_NUMBERS, *_TEXTS, [], {}, [[]], [{}], {"": ""})
_WORDS = """
model messages input role content type text stream max_tokens max_output_tokens n prompt query documents tools
tool_choice function name parameters response_format json_schema schema stop temperature top_p seed logprobs
top_logprobs stream_options include_usage system logit_bias chat_template_kwargs reasoning_effort thinking
instructions metadata tool_calls tool_call_id input_prefix input_suffix input_extra n_predict content tokens filename
"""
_NAMES = tuple(_WORDS.split())


# What the other routes want, of each body some.
_FURTHER: dict[str, Any] = {
    **dict.fromkeys(("input", "prompt", "query", "content", "input_prefix"), "Hi."),
    "documents": ["a", "b"],
    "tokens": [1, 2],
    "input_extra": [{"text": "x", "filename": "a.py"}],
}


def _mutated(random_: random.Random) -> Any:
    """A good body with a few things put where they do not belong."""
    body: Any = _plain() | {name: value for name, value in deepcopy(_FURTHER).items() if random_.random() < 0.5}
    for _ in range(random_.randint(1, 4)):
        place: Any = body
        while isinstance(place, dict | list) and place and random_.random() < 0.6:
            place = random_.choice(list(place.values()) if isinstance(place, dict) else place)
        value = _value(random_, depth=3)
        if isinstance(place, dict):
            place[random_.choice(_NAMES)] = value
        elif isinstance(place, list):
            place.insert(random_.randint(0, len(place)), value)
        else:
            body[random_.choice(_NAMES)] = value
    return body


def _value(random_: random.Random, *, depth: int) -> Any:
    if depth == 0 or random_.random() < 0.6:
        # A copy: what is put into one body must not grow in another, or into itself.
        return deepcopy(random_.choice(_LEAVES))
    if random_.random() < 0.5:
        return [_value(random_, depth=depth - 1) for _ in range(random_.randint(0, 3))]
    return {random_.choice(_NAMES): _value(random_, depth=depth - 1) for _ in range(random_.randint(0, 3))}


def test_bodies(served: GatewayProcess) -> None:
    random_ = random.Random(11669)
    engines = served.engine_pids()
    with httpx.Client(base_url=served.url, timeout=60) as client:
        for number in range(_BODIES):
            body = orjson.dumps(_mutated(random_))
            if random_.random() < 0.1:
                at = random_.randrange(len(body))
                body = body[:at] + random_.choice([b"", b"\xff", b"\x00", b"}", b'"', b"1e400"]) + body[at + 1 :]
            path = random_.choice(_PATHS)
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500 or answer.status_code in _TYPED, (number, path, body, answer.text)
            assert answer.headers["x-request-id"]
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert isinstance(error["message"], str)
                assert isinstance(error["type"], str)
        assert client.post(_PATHS[0], json=_plain()).status_code == 200
    assert served.engine_pids() == engines


def _request(random_: random.Random) -> bytes:
    body = orjson.dumps(_plain())
    head = (
        f"POST {random_.choice(_PATHS)} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _broken(random_: random.Random) -> bytes:
    """A good request with bytes changed, taken out, doubled, or lines put in."""
    request = bytearray(_request(random_))
    for _ in range(random_.randint(1, 6)):
        at = random_.randrange(len(request))
        match random_.randrange(5):
            case 0:
                request[at] = random_.randrange(256)
            case 1:
                del request[at : at + random_.randint(1, 20)]
            case 2:
                request[at:at] = request[at : at + random_.randint(1, 40)]
            case 3:
                request[at:at] = random_.choice([b"\r\n", b"\n", b"\x00", b"\r\n\r\n", b": ", b"\x80", b"0" * 70])
            case _:
                line = random_.choice(_LINES)
                end = request.find(b"\r\n") + 2
                request[end:end] = line
    return bytes(request)


_LINES = (
    b"transfer-encoding: chunked\r\n",
    b"content-length: 3\r\n",
    b"expect: 100-continue\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n",
    b"host: evil.example\r\n",
    b"content-encoding: gzip\r\n",
    b"authorization: Bearer a\r\nauthorization: Bearer b\r\n",
    b"x: " + b"y" * 70_000 + b"\r\n",
    b" folded\r\n",
)


def test_raw_requests(served: GatewayProcess) -> None:
    random_ = random.Random(11434)
    engines = served.engine_pids()
    address = urlsplit(served.url)

    def send(request: bytes) -> None:
        with socket.create_connection((address.hostname, address.port), timeout=_PATIENCE_SECONDS) as connection:
            answer = _answer_to(connection, request)
        for status in _statuses(answer):
            assert status < 500 or status in _TYPED, (request[:400], answer[:400])

    # Side by side, since many are left without an end and only wait.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, [_broken(random_) for _ in range(_BODIES * 2 // 5)]))
    assert httpx.post(served.url + _PATHS[0], json=_plain(), timeout=60).status_code == 200
    assert served.engine_pids() == engines
    assert is_alive(served.pid)


def _answer_to(connection: socket.socket, request: bytes) -> bytes:
    """What came until the connection ended; a request without its end is left there for the gateway's deadline."""
    answer = b""
    with suppress(OSError):
        connection.sendall(request)
        while part := connection.recv(65536):
            answer += part
    return answer


def _statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]
