"""Every collector, declared once on one registry. Scraping reads these numbers and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

UNKNOWN = "_unknown"


class Metrics:
    """All collectors; labels only ever carry configured names, so that no client can grow them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._declare_requests()
        self._declare_tokens()
        self._declare_engines()
        self._declare_memory()

    def _counter(self, name: str, about: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"llama_gateway_{name}", about, tuple(labels), registry=self.registry)

    def _gauge(self, name: str, about: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"llama_gateway_{name}", about, tuple(labels), registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"llama_gateway_{name}", about, ("model",), buckets=buckets, registry=self.registry)

    def _declare_requests(self) -> None:
        self.requests = self._counter("requests", "Requests by how they ended.", ("model", "endpoint", "outcome"))
        self.rejected = self._counter("rejected", "Requests refused before an engine saw them.", ("reason",))
        self.context_overflow = self._counter("context_overflow", "Requests over the context of a slot.", ("model",))
        self.client_disconnects = self._counter("client_disconnects", "Clients that left before their answer ended.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to the first byte of its answer.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Mean time between the tokens of one answer.", _TOKEN_LATENCY
        )
        self.request_duration = self._histogram(
            "request_duration_seconds", "From the request's arrival to the end of its answer.", _SECONDS
        )
        self.queue_wait = self._histogram("queue_wait_seconds", "Time spent waiting for a slot.", _SECONDS)
        self.queue_depth = self._gauge("queue_depth", "Requests waiting for a slot.", ("model",))
        self.slots = self._gauge("slots", "Slots of the engine, by state busy or idle.", ("model", "state"))

    def _declare_tokens(self) -> None:
        # "request_" keeps these apart from the counters: OpenMetrics gives a counter's family no "_total".
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_size = self._histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed or reused.", ("model", "key"))
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens taken from the cache of a slot.", ("model", "key")
        )
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.", ("model", "key"))
        self.prompt_rate = self._gauge("prompt_tokens_per_second", "Prefill speed of the last request.", ("model",))
        self.generation_rate = self._gauge(
            "generation_tokens_per_second", "Decode speed of the last request.", ("model",)
        )

    def _declare_engines(self) -> None:
        self.model_state = self._gauge("model_state", "1 for the state that the model is in.", ("model", "state"))
        self.engine_restarts = self._counter(
            "engine_restarts", "Engines started again after they died.", ("model", "cause")
        )
        self.evictions = self._counter("evictions", "Models stopped to make room for another.", ("model",))
        self.engine_resident = self._gauge("engine_resident_bytes", "Resident memory of the engine.", ("model",))
        self.offloaded_layers = self._gauge(
            "offloaded_layers", "Layers on a device, as planned and as the engine reports.", ("model", "kind")
        )

    def _declare_memory(self) -> None:
        self.planned_memory = self._gauge(
            "model_memory_planned_bytes", "Memory that the plan gives to a model.", ("model", "device", "part")
        )
        self.measured_memory = self._gauge(
            "model_memory_measured_bytes", "Memory that the engine reports.", ("model", "device", "part")
        )
        self.device_memory = self._gauge("device_memory_bytes", "Memory of a device.", ("device", "kind"))
        self.ram = self._gauge("ram_bytes", "RAM within the limits of this process.", ("kind",))

    def forget_memory(self, model: str) -> None:
        """A model that is not loaded holds nothing."""
        for gauge in (self.planned_memory, self.measured_memory, self.offloaded_layers):
            _remove(gauge, model)

    def forget_model(self, model: str) -> None:
        """A model that is no longer configured has no state."""
        self.forget_memory(model)
        for gauge in (self.model_state, self.engine_resident, self.slots, self.queue_depth):
            _remove(gauge, model)

    def expose(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


def _remove(gauge: Gauge, model: str) -> None:
    gauge.remove_by_labels({"model": model})
