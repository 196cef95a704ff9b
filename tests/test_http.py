"""The surface: what is answered, in which shape, and that nothing else is."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.checklist import lines, rows
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.gateway import GatewayProcess, running_gateway

HELLO: dict[str, Any] = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}


@pytest.fixture
def client(gateway: GatewayProcess):
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object; every failure has all four keys and a request id."""
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/health"])
def test_health(client: httpx.Client, path: str) -> None:
    assert client.get(path).json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_chat_with_and_without_v1(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=HELLO).json()["usage"]["completion_tokens"] == 2


UNKNOWN = [
    "/nothing",
    "/v1/models//",
    "//v1/models",
    "/v1/../slots",
    "/slots",
    "/props",
    "/v1/stream",
    "/docs",
]


@lines(24, 27, 28)
@pytest.mark.parametrize("path", UNKNOWN)
def test_every_other_path_is_unknown(gateway: GatewayProcess, path: str) -> None:
    answer = httpx.get(gateway.url + path)
    assert answer.status_code == 404
    assert error_of(answer)["code"] in ("unknown_url", "model_not_found")


@lines(20)
def test_wrong_method(client: httpx.Client) -> None:
    answer = client.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert error_of(answer)["code"] == "method_not_allowed"


@lines(21)
def test_head_of_models(client: httpx.Client) -> None:
    answer = client.head("/v1/models")
    assert answer.status_code == 200
    assert answer.content == b""
    assert int(answer.headers["content-length"]) > 0


@lines(1, 2, 7)
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b'{"a": "\xff\xfe"}', b'{"a": "\\ud800"}', b"{} x"])
def test_a_body_that_is_no_json_object(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@lines(15, 16, 17, 19)
@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "application/json; charset=latin-1"],
)
def test_wrong_content_type(client: httpx.Client, content_type: str) -> None:
    answer = client.post("/v1/chat/completions", content=b"{}", headers={"content-type": content_type})
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


@lines(18)
def test_compressed_body(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", content=b"{}", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


@lines(12, 13)
@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit(client: httpx.Client, chunked: bool) -> None:
    size = (16 << 20) + 1
    content: Any = (b"x" * 65536 for _ in range(size // 65536 + 1)) if chunked else b"x" * size
    answer = client.post("/v1/chat/completions", content=content)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"


@lines(12)
def test_an_announced_body_over_the_limit_is_refused_before_it_is_sent(gateway: GatewayProcess) -> None:
    address = urlsplit(gateway.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: 99999999999\r\n\r\n{"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_the_id_of_a_request_is_kept_when_it_is_harmless(client: httpx.Client) -> None:
    assert client.get("/livez", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert client.get("/livez", headers={"x-request-id": "a b\tc"}).headers["x-request-id"] != "a b\tc"


@rows(8)
def test_a_stream_is_not_buffered_on_its_way(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        body = answer.read()
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"prompt_progress" not in body
    assert b'"usage"' not in body


@lines(26)
def test_models_by_name_alias_and_escaped_slash(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL_ID]
    assert client.get("/models").json() == listed
    assert client.get(f"/v1/models/{MODEL_ID}").json() == listed["data"][0]
    unknown = client.get("/v1/models/a%2Fb")
    assert unknown.status_code == 404
    assert "'a/b'" in error_of(unknown)["message"]
    assert "/" not in error_of(unknown)["message"].replace("'a/b'", "")


def test_metrics_count_what_happened_and_scraping_counts_as_nothing(
    gateway: GatewayProcess, client: httpx.Client
) -> None:
    client.post("/v1/chat/completions", json=HELLO)
    before = scrape(client)
    used = client.post("/v1/chat/completions", json=HELLO).json()["usage"]
    client.post("/v1/chat/completions", json=HELLO | {"model": "absent"})
    client.post("/v1/chat/completions", json=HELLO | {"max_tokens": CONTEXT_TOKENS})
    after = scrape(client)

    def grown(name: str, **labels: str) -> float:
        key = (name, frozenset(labels.items()))
        return after.get(key, 0) - before.get(key, 0)

    model = {"model": MODEL_ID}
    assert grown("llama_gateway_requests_total", **model, endpoint="chat", outcome="ok") == 1
    assert grown("llama_gateway_requests_total", **model, endpoint="chat", outcome="rejected") == 1
    assert grown("llama_gateway_rejected_total", reason="model_not_found") == 1
    assert grown("llama_gateway_rejected_total", reason="context_length_exceeded") == 1
    assert grown("llama_gateway_context_overflow_total", **model) == 1
    assert grown("llama_gateway_generation_tokens_total", **model, key="anonymous") == used["completion_tokens"]
    assert grown("llama_gateway_prompt_tokens_total", **model, key="anonymous") == used["prompt_tokens"]
    assert grown("llama_gateway_time_to_first_token_seconds_count", **model) == 1
    assert after["llama_gateway_model_state", frozenset({**model, "state": "ready"}.items())] == 1
    assert after["llama_gateway_slots", frozenset({**model, "state": "busy"}.items())] == 0
    assert after["llama_gateway_slots", frozenset({**model, "state": "idle"}.items())] == 2
    assert after["llama_gateway_ram_bytes", frozenset({"kind": "total"}.items())] > 1 << 30
    assert after["llama_gateway_generation_tokens_per_second", frozenset(model.items())] > 0
    weights = {"device": "host", "part": "weights"}
    assert after["llama_gateway_model_memory_planned_bytes", frozenset({**model, **weights}.items())] > 90 << 20
    assert any(name == "llama_gateway_model_memory_measured_bytes" for name, _ in after)


def scrape(client: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels."""
    text = client.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_openmetrics_is_spoken_to_who_asks_for_it(client: httpx.Client) -> None:
    plain = client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    asked = client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in openmetrics_families(asked.text)}
    assert families["llama_gateway_build"].type == "info"
    engine_bytes = [sample.value for sample in families["llama_gateway_engine_resident_bytes"].samples]
    assert max(engine_bytes, default=0) >= 0


@rows(28)
def test_a_scrape_does_not_load_a_model(engine: str, demo_model: Any, tmp_path: Any) -> None:
    config = {"engine": {"binary": engine}, "models": {MODEL_ID: {"path": str(demo_model), "context": 256}}}
    with running_gateway(config, tmp_path) as own, httpx.Client(base_url=own.url) as client:
        for path in ("/metrics", "/v1/models", f"/v1/models/{MODEL_ID}", "/health", "/readyz"):
            assert client.get(path).status_code == 200
        assert own.engine_pids() == []
        model = client.get(f"/v1/models/{MODEL_ID}").json()
        assert (model["state"], model["max_model_len"]) == ("stopped", 256)


@lines(30, 31, 32, 33, 34)
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"content-length: 2\r\ntransfer-encoding: chunked", b"400"),
        (b"content-length: 2\r\ncontent-length: 3", b"400"),
        (b"content-length: +2", b"400"),
        (b"transfer-encoding: xchunked", b"400"),
        (b"x: a\r\n  folded", b"400"),
    ],
)
def test_requests_that_can_be_read_in_two_ways_are_refused(gateway: GatewayProcess, head: bytes, status: bytes) -> None:
    address = urlsplit(gateway.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + head + b"\r\n\r\n{}")
        assert connection.recv(4096).split(b" ")[1] == status
