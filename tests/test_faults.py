"""What an engine says went wrong, and what our client is told."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.backends.faults import engine_fault, fault_of
from app.errors import (
    ContextLengthExceeded,
    GatewayError,
    ModelLoading,
    RequestError,
    Unavailable,
    UpstreamFailed,
)


def _fault(status: int, message: str, kind: str = "server_error", **more: Any) -> GatewayError:
    return engine_fault(status, orjson.dumps({"error": {"code": status, "message": message, "type": kind, **more}}))


def test_an_overflow_carries_both_numbers() -> None:
    message = "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it"
    fault = _fault(400, message, "exceed_context_size_error", n_prompt_tokens=5000, n_ctx=4096)
    assert isinstance(fault, ContextLengthExceeded)
    error = fault.body()["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 5000, 4096)


def test_an_overflow_without_numbers_is_one_all_the_same() -> None:
    assert isinstance(_fault(400, "too long", "exceed_context_size_error"), ContextLengthExceeded)


_TABLE: list[tuple[int, str, type[GatewayError], int]] = [
    (400, "Field 'max_tokens': Value must be between -1 and 5", RequestError, 400),
    (400, "Failed to initialize samplers: bad grammar", RequestError, 400),
    (501, "This server does not support embeddings", RequestError, 400),
    # Faults of the request that the engine calls its own: SDKs would send them again.
    (500, "Failed to parse messages: Missing 'role' in message", RequestError, 400),
    (500, "Failed to parse tools: tool missing type", RequestError, 400),
    (500, "image input is not supported - hint: you may need to provide the mmproj", RequestError, 400),
    (500, "audio input is not supported", RequestError, 400),
    (500, "tools param requires --jinja flag", RequestError, 400),
    (500, "Jinja Exception: Conversation roles must alternate", RequestError, 400),
    (500, "Failed to load image or audio file", RequestError, 400),
    (500, "input (600 tokens) is too large to process. increase the physical batch size", RequestError, 400),
    (500, "failed to parse grammar", RequestError, 400),
    # Its own.
    (500, "Context size has been exceeded.", Unavailable, 503),
    (503, "Loading model", ModelLoading, 503),
    (500, "Compute error.", UpstreamFailed, 502),
    (500, "decode() failed", UpstreamFailed, 502),
    (500, "got exception: bad_alloc", UpstreamFailed, 502),
    # Only our own key can be wrong there, and only our own path.
    (401, "Invalid API Key", UpstreamFailed, 502),
    (404, "File Not Found", UpstreamFailed, 502),
]


@pytest.mark.parametrize(("status", "message", "kind", "answered"), _TABLE)
def test_the_table(status: int, message: str, kind: type[GatewayError], answered: int) -> None:
    fault = _fault(status, message)
    assert type(fault) is kind
    assert fault.status == answered
    assert set(fault.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("message", ["Compute error.", "Field 'n': no", "Jinja Exception: roles must alternate"])
def test_the_engines_reason_is_passed_on(message: str) -> None:
    assert message in _fault(500 if "Field" not in message else 400, message).message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Field 'max_tokens': Value must be between -1 and 5", "max_tokens"),
        ("Field 'messages[0].content': wrong", "messages[0].content"),
        ("something else", None),
    ],
)
def test_the_field_is_named(message: str, param: str | None) -> None:
    assert _fault(400, message).param == param


@pytest.mark.parametrize("status", [503, 500])
def test_what_passes_by_says_when_to_come_back(status: int) -> None:
    fault = _fault(status, "Context size has been exceeded." if status == 500 else "Loading model")
    assert 1 <= int(fault.headers()["retry-after"]) <= 60


_NO_OBJECT = [
    *(b"", b"proxy error: Failed to read connection", b"[]", b"5", b'"error"', b"null", b"{}", b'{"error":null}'),
    *(b'{"error":[]}', b'{"error":{}}', b'{"error":{"message":null}}', b'{"error":"plain text"}', b"\xff", b"[" * 9999),
    b'{"error":{"message":5,"type":[],"code":{}}}',
]


@pytest.mark.parametrize("body", _NO_OBJECT)
@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestError), (500, UpstreamFailed), (502, UpstreamFailed), (503, ModelLoading)]
)
def test_an_answer_that_is_no_error_object(body: bytes, status: int, kind: type[GatewayError]) -> None:
    fault = engine_fault(status, body)
    assert type(fault) is kind
    assert fault.message


def test_a_plain_text_error_is_told() -> None:
    assert "plain text" in engine_fault(500, b'{"error":"plain text"}').message


@pytest.mark.parametrize("numbers", [{"n_prompt_tokens": None}, {"n_ctx": None}, {}])
def test_numbers_that_are_missing(numbers: dict[str, None]) -> None:
    assert isinstance(fault_of(400, {"type": "exceed_context_size_error", **numbers}), ContextLengthExceeded)


_LEAKS = [
    "failed to open /home/eve/models/m.gguf",
    "failed to open '/home/eve/models/m.gguf'",
    "model=/home/eve/m.gguf: bad magic",
    "(/home/eve/.cache/m.gguf)",
    "GGML_ASSERT: /home/eve/src/ggml.c:123",
    "failed to open /home/eve@work/models/m.gguf",
    'failed to open "/home/eve models/m.gguf"',
    "failed to open /eve.gguf",
    r"failed to open C:\Users\eve\m.gguf",
    r"failed to open 'C:/Users/eve/m.gguf'",
]


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("message", _LEAKS)
def test_no_path_of_the_machine_leaks(status: int, message: str) -> None:
    told = _fault(status, message).message
    assert "eve" not in told
    assert ".gguf" not in told


@pytest.mark.parametrize("message", ["and/or", "1/2 of it", "tokens/s", "roles must alternate user/assistant/user"])
def test_what_is_no_path_stays(message: str) -> None:
    assert message in _fault(400, message).message


def test_a_long_reason_is_cut() -> None:
    assert len(_fault(500, "x" * 100_000).message) < 600
