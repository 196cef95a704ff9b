"""What one exchange adds to the gateway's numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from app.errors import ContextLengthExceeded, GatewayError, UpstreamFailed, UpstreamTimeout
from app.logs import request_id
from app.metrics import Metrics, ModelMeters
from app.protocol import UsageMeter
from app.request_record import Observer, RequestRecord
from app.trace_context import trace_context


class Account:
    """The marks of one exchange on the clock, and their entry in the metrics when it has ended.

    The time to the first token is made of the wait for the model, the wait for a slot, and the prefill, which begins
    when the request is sent to the engine; and of our own work between them, such as counting the prompt.
    """

    def __init__(
        self, metrics: Metrics, *, model_id: str, key: str, endpoint: str, observers: Sequence[Observer] = ()
    ) -> None:
        self._metrics = metrics
        self._model_id = model_id
        self._key = key
        self._endpoint = endpoint
        self._observers = observers
        self._arrived = time.monotonic()
        self._sent: float | None = None
        self._load_seconds = 0.0
        self.queue_seconds = 0.0
        self.busy_slots = 1.0
        # What the client has got decides whether the request may be sent again, what the engine gave is measured.
        self.first_byte: float | None = None
        self.first_token: float | None = None

    def entered(self, since: float) -> None:
        """The model, asked for at ``since``, is there."""
        self._load_seconds += time.monotonic() - since

    def sent(self) -> None:
        """The request goes to the engine, perhaps again."""
        self._sent = time.monotonic()

    def told(self, error: GatewayError) -> None:
        """A refusal inside a stream, which the handler of all others never sees."""
        if not isinstance(error, UpstreamFailed | UpstreamTimeout):
            self._metrics.rejected.labels(error.code or error.type).inc()

    def close(self, outcome: str, error: GatewayError | None, meter: UsageMeter, *, prompt_tokens: int) -> None:
        """Count the exchange as ended; ``prompt_tokens`` is what the engine has read or reused of the prompt."""
        ended = time.monotonic()
        record = self._record(outcome, error, meter, prompt_tokens=prompt_tokens, ended=ended)
        meters = self._metrics.of(self._model_id)
        meters.outcome(self._endpoint, outcome).inc()
        meters.duration.observe(record.duration_seconds)
        if outcome == "client_gone":
            self._metrics.client_disconnects.inc()
        if isinstance(error, ContextLengthExceeded):
            meters.context_overflow.inc()
        if self._sent is not None:
            meters.load_wait.observe(record.load_seconds)
        if prompt_tokens:
            self._count_tokens(meters, record)
        if record.first_token_seconds is not None:
            _count_answer(meters, record)
        for observer in self._observers:
            observer(record)

    def _record(
        self, outcome: str, error: GatewayError | None, meter: UsageMeter, *, prompt_tokens: int, ended: float
    ) -> RequestRecord:
        sent, first, timings = self._sent, self.first_token, meter.timings
        prefill_ended = ended if first is None else first
        return RequestRecord(
            request_id.get(),
            self._key,
            self._model_id,
            self._endpoint,
            outcome,
            None if error is None else error.code or error.type,
            time.time(),
            ended - self._arrived,
            self._load_seconds,
            self.queue_seconds,
            0.0 if sent is None else prefill_ended - sent,
            0.0 if first is None else ended - first,
            None if first is None else first - self._arrived,
            prompt_tokens,
            meter.cached_tokens,
            meter.generated_tokens,
            None if timings is None else timings.prompt_tokens_per_second,
            None if timings is None else timings.generation_tokens_per_second,
            self.busy_slots,
            trace_context.get(),
        )

    def _count_tokens(self, meters: ModelMeters, record: RequestRecord) -> None:
        counters = meters.key(self._key)
        counters.prompt_tokens.inc(record.prompt_tokens)
        counters.cached_prompt_tokens.inc(record.cached_tokens)
        counters.generation_tokens.inc(record.generated_tokens)
        meters.prompt_size.observe(record.prompt_tokens)


def _count_answer(meters: ModelMeters, record: RequestRecord) -> None:
    generated = record.generated_tokens
    meters.time_to_first_token.observe(record.first_token_seconds or 0.0)
    meters.prefill.observe(record.prefill_seconds)
    meters.decode.observe(record.decode_seconds)
    meters.generation_size.observe(generated)
    if generated > 1:
        meters.inter_token_latency.observe(record.decode_seconds / (generated - 1))
    if record.prompt_tokens_per_second is not None:
        meters.prompt_rate.set(record.prompt_tokens_per_second)
        meters.prompt_rates.observe(record.prompt_tokens_per_second)
    if record.generation_tokens_per_second is not None:
        meters.generation_rate.set(record.generation_tokens_per_second)
        meters.generation_rates.observe(record.generation_tokens_per_second)
