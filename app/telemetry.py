"""Traces and metrics for an OpenTelemetry collector, by the conventions for generative AI; needs the extra ``otel``.

A span is made when its request has ended, from the record that the request log gets too: nothing is added to the
requests themselves, and no prompt can get into a span.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from app import __version__
from app.request_record import RequestRecord
from app.trace_context import TraceContext, begun

_PROVIDER = "llama_cpp"
_SCOPE = "llama-gateway"
_EXPORT_MILLISECONDS = 15_000
# Endpoints by the operation that the conventions know.
_OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings", "rerank": "rerank"}
# The conventions' own boundaries.
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class Telemetry:
    """Exports to ``endpoint`` (OTLP over HTTP) from threads of its own; what cannot be delivered is dropped."""

    def __init__(self, endpoint: str, *, traces: bool, metrics: bool) -> None:
        base = endpoint.rstrip("/")
        self._resource = Resource.create({"service.name": _SCOPE, "service.version": __version__})
        self._scope = InstrumentationScope(_SCOPE, __version__)
        self._spans = BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")) if traces else None
        self._meters = _Meters(f"{base}/v1/metrics", self._resource) if metrics else None

    def observe(self, record: RequestRecord) -> None:
        """One request has ended."""
        attributes = _attributes(record)
        if self._spans is not None:
            self._spans.on_end(self._span(record, attributes))
        if self._meters is not None:
            self._meters.observe(record, attributes)

    async def run(self) -> None:
        """Until cancelled; then what is left is sent."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._spans is not None:
            self._spans.shutdown()  # type: ignore[no-untyped-call]
        if self._meters is not None:
            self._meters.close()

    def _span(self, record: RequestRecord, attributes: Mapping[str, Any]) -> ReadableSpan:
        trace = record.trace or begun()
        started_at = record.ended_at - record.duration_seconds
        events = []
        if record.first_token_seconds is not None:
            events = [Event("first_token", timestamp=_nanoseconds(started_at + record.first_token_seconds))]
        failed = record.outcome in ("failed", "rejected")
        return ReadableSpan(
            f"{attributes['gen_ai.operation.name']} {record.model}",
            context=_span_context(trace, trace.span_id),
            parent=None if trace.parent_id is None else _span_context(trace, trace.parent_id, is_remote=True),
            resource=self._resource,
            attributes=dict(attributes) | _figures(record),
            events=events,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, record.error) if failed else Status(StatusCode.UNSET),
            start_time=_nanoseconds(started_at),
            end_time=_nanoseconds(record.ended_at),
            instrumentation_scope=self._scope,
        )


class _Meters:
    def __init__(self, endpoint: str, resource: Resource) -> None:
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint), export_interval_millis=_EXPORT_MILLISECONDS
        )
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(_SCOPE, __version__)

        def histogram(name: str, unit: str, about: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(name, unit, about, explicit_bucket_boundaries_advisory=bounds)

        self._tokens = histogram("gen_ai.client.token.usage", "{token}", "Tokens of a request.", _TOKENS)
        self._duration = histogram("gen_ai.server.request.duration", "s", "Duration of a request.", _SECONDS)
        self._first = histogram("gen_ai.server.time_to_first_token", "s", "Time to the first token.", _FIRST_TOKEN)
        self._each = histogram("gen_ai.server.time_per_output_token", "s", "Time per further token.", _PER_TOKEN)

    def observe(self, record: RequestRecord, attributes: Mapping[str, Any]) -> None:
        self._duration.record(record.duration_seconds, attributes)
        if record.first_token_seconds is None:
            return
        self._tokens.record(record.prompt_tokens, {**attributes, "gen_ai.token.type": "input"})
        self._tokens.record(record.generated_tokens, {**attributes, "gen_ai.token.type": "output"})
        self._first.record(record.first_token_seconds, attributes)
        if record.generated_tokens > 1:
            self._each.record(record.decode_seconds / (record.generated_tokens - 1), attributes)

    def close(self) -> None:
        self._provider.shutdown()


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Those that metrics may carry too: few values each."""
    attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(record.endpoint, "chat"),
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
    }
    return attributes if record.error is None else attributes | {"error.type": record.error}


def _figures(record: RequestRecord) -> dict[str, Any]:
    return {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "llama_gateway.request_id": record.request_id,
        "llama_gateway.key": record.key,
        "llama_gateway.outcome": record.outcome,
        "llama_gateway.load_seconds": record.load_seconds,
        "llama_gateway.queue_seconds": record.queue_seconds,
        "llama_gateway.prefill_seconds": record.prefill_seconds,
        "llama_gateway.decode_seconds": record.decode_seconds,
    }


def _span_context(trace: TraceContext, span_id: int, *, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(trace.trace_id, span_id, is_remote, flags)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
