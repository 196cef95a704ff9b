"""A trace is taken up, passed on, and told to a collector; nothing of it happens unasked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from app.config import Settings
from app.errors import SetupError
from app.events import EventLog
from app.metrics import Metrics
from app.observers import Observers
from app.trace_context import begun, continued
from tests.conftest import MODEL_ID
from tests.inprocess import gateway_in_process
from tests.remote_server import Plain, plain_server

pytestmark = pytest.mark.any_engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"
CANARY = "xylophone"
HELLO = {"model": MODEL_ID, "messages": [{"role": "user", "content": f"Say {CANARY}."}], "max_tokens": 6}


# The header


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        HEADER.upper(),
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01\r\nx: y",
        "x" * 10_000,
    ],
)
def test_a_header_that_is_not_valid_is_no_trace(header: str) -> None:
    assert continued(header, "", with_span=True) is None


def test_without_a_span_of_ours_the_header_is_passed_on_as_it_came() -> None:
    context = continued(HEADER, "vendor=1", with_span=False)
    assert context is not None
    assert context.headers() == {"traceparent": HEADER, "tracestate": "vendor=1"}


@pytest.mark.parametrize("state", ["vendor=1\r\nx: y", "vendor=\xe9", "v=" + "x" * 511])
def test_a_state_that_is_not_valid_is_left_out(state: str) -> None:
    context = continued(HEADER, state, with_span=False)
    assert context is not None
    assert context.headers() == {"traceparent": HEADER}


def test_with_a_span_of_ours_it_is_the_parent_of_what_follows() -> None:
    context = continued(f"cc-{TRACE}-{PARENT}-00-more", "x" * 600, with_span=True)
    assert context is not None
    assert (f"{context.trace_id:032x}", context.parent_id) == (TRACE, int(PARENT, 16))
    passed = context.headers()
    assert passed["traceparent"].startswith(f"00-{TRACE}-")
    assert passed["traceparent"].endswith("-00")
    assert PARENT not in passed["traceparent"]
    assert "tracestate" not in passed


def test_every_trace_that_begins_here_is_another() -> None:
    assert len({begun().trace_id for _ in range(1000)}) == 1000


# The collector


@dataclass
class Collector:
    """What was exported, decoded."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    raw: bytes = b""

    async def take_traces(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    async def take_metrics(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.raw += body
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        return web.Response(content_type="application/x-protobuf")


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    taken = Collector()
    app = web.Application()
    app.add_routes([web.post("/v1/traces", taken.take_traces), web.post("/v1/metrics", taken.take_metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        taken.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield taken
    finally:
        await runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def test_a_collector_gets_a_span_and_figures_of_every_request(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    async with collector() as taken:
        settings = {"telemetry": {"otlp": taken.url}}
        async with (
            gateway_in_process(one_engine, demo_model, tmp_path, settings=settings, context=256) as running,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}", timeout=60) as client,
        ):
            answer = await client.post("/v1/chat/completions", json=HELLO, headers={"traceparent": HEADER})
            await client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 4096})
    usage = answer.json()["usage"]
    joined, alone = taken.spans
    assert (joined.name, joined.trace_id.hex(), joined.parent_span_id.hex()) == (f"chat {MODEL_ID}", TRACE, PARENT)
    figures = attributes(joined)
    assert figures["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert figures["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert figures["llama_gateway.request_id"] == answer.headers["x-request-id"]
    assert [event.name for event in joined.events] == ["first_token"]
    assert joined.start_time_unix_nano < joined.events[0].time_unix_nano <= joined.end_time_unix_nano
    assert (alone.parent_span_id, alone.trace_id != joined.trace_id) == (b"", True)
    assert attributes(alone)["error.type"] == "context_length_exceeded"
    assert CANARY.encode() not in taken.raw
    tokens = {
        point.attributes[-1].value.string_value or point.attributes[0].value.string_value: point.sum
        for point in taken.metrics["gen_ai.client.token.usage"].histogram.data_points
    }
    assert sum(tokens.values()) == usage["total_tokens"]
    assert taken.metrics["gen_ai.server.request.duration"].histogram.data_points[0].count >= 1


# Passed on


class Listening(Plain):
    """A server elsewhere that remembers the heads of what it was asked."""

    def __init__(self) -> None:
        super().__init__(answer=(503, {}, {"error": {"message": "no"}}))
        self.heads: list[dict[str, str]] = []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.heads.append(dict(request.headers))
        return await super().chat(request)


async def test_a_remote_server_is_sent_the_trace_and_none_where_there_is_none(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    far = Listening()
    async with plain_server(far) as url:
        models = {MODEL_ID: {"path": demo_model, "context": 256}, "far": {"url": url, "context": 512}}
        async with (
            gateway_in_process(one_engine, demo_model, tmp_path, settings={"models": models}) as running,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}", timeout=60) as client,
        ):
            sent = {"traceparent": HEADER, "tracestate": "vendor=1"}
            await client.post("/v1/chat/completions", json=HELLO | {"model": "far"}, headers=sent)
            await client.post("/v1/chat/completions", json=HELLO | {"model": "far"}, headers={"traceparent": "junk"})
    with_trace, without = far.heads[0], far.heads[-1]
    assert (with_trace["traceparent"], with_trace["tracestate"]) == (HEADER, "vendor=1")
    assert "traceparent" not in without


async def test_the_packages_are_loaded_only_when_asked_for() -> None:
    code = "import sys, app.main; print(sorted(name for name in sys.modules if name.startswith('opentelemetry.sdk')))"
    loaded = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert loaded.stdout.strip() == "[]"


def test_a_missing_package_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "app.telemetry", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    settings = Settings.model_validate({"telemetry": {"otlp": "http://127.0.0.1:4318"}})
    with pytest.raises(SetupError, match=r"install llama-gateway\[otel\]"):
        Observers.of(settings, Metrics(), EventLog())
