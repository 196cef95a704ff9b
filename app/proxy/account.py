"""What one exchange adds to the gateway's numbers."""

from __future__ import annotations

import time

from prometheus_client import Gauge

from app.errors import ContextLengthExceeded, GatewayError
from app.metrics import Metrics
from app.protocol import UsageMeter


class Account:
    """The marks of one exchange on the clock, and their entry in the metrics when it has ended."""

    def __init__(self, metrics: Metrics, *, model_id: str, key: str, endpoint: str) -> None:
        self._metrics = metrics
        self._model_id = model_id
        self._key = key
        self._endpoint = endpoint
        self._arrived = time.monotonic()
        self.first_byte: float | None = None

    def close(self, outcome: str, error: GatewayError | None, meter: UsageMeter) -> None:
        """Count the exchange as ended."""
        metrics, model_id, ended = self._metrics, self._model_id, time.monotonic()
        metrics.requests.labels(model_id, self._endpoint, outcome).inc()
        metrics.request_duration.labels(model_id).observe(ended - self._arrived)
        if outcome == "client_gone":
            metrics.client_disconnects.inc()
        if isinstance(error, ContextLengthExceeded):
            metrics.context_overflow.labels(model_id).inc()
        if self.first_byte is not None:
            self._count_answer(meter, first_byte=self.first_byte, ended=ended)
        self._count_prompt(meter)

    def _count_answer(self, meter: UsageMeter, *, first_byte: float, ended: float) -> None:
        metrics, model_id, generated = self._metrics, self._model_id, meter.generated_tokens
        metrics.time_to_first_token.labels(model_id).observe(first_byte - self._arrived)
        metrics.generation_tokens.labels(model_id, self._key).inc(generated)
        metrics.generation_size.labels(model_id).observe(generated)
        if generated > 1:
            metrics.inter_token_latency.labels(model_id).observe((ended - first_byte) / (generated - 1))

    def _count_prompt(self, meter: UsageMeter) -> None:
        metrics, model_id = self._metrics, self._model_id
        if meter.usage is not None:
            metrics.prompt_tokens.labels(model_id, self._key).inc(meter.usage.prompt_tokens)
            metrics.cached_prompt_tokens.labels(model_id, self._key).inc(meter.usage.cached_tokens)
            metrics.prompt_size.labels(model_id).observe(meter.usage.prompt_tokens)
        if meter.timings is not None:
            _set_rate(metrics.prompt_rate.labels(model_id), meter.timings.prompt_tokens_per_second)
            _set_rate(metrics.generation_rate.labels(model_id), meter.timings.generation_tokens_per_second)


def _set_rate(gauge: Gauge, tokens_per_second: float | None) -> None:
    if tokens_per_second is not None:
        gauge.set(tokens_per_second)
