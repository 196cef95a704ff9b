"""Every collector, declared once on one registry. Scraping reads these numbers and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, disable_created_metrics
from prometheus_client.process_collector import ProcessCollector

from app import __version__
from app.exposition import Exposition
from app.histogram import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FEWER_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 1, 2.5)
_LOAD_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PROMPT_RATE = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
_GENERATION_RATE = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_TOKENS = (16, 64, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

_OUTCOMES = ("ok", "rejected", "failed", "client_gone")

UNKNOWN = "_unknown"


class Metrics:
    """All collectors; labels only ever carry configured names, so that no client can grow them."""

    def __init__(self) -> None:
        # The library would add the time of its creation to every series, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._histograms: list[Histogram] = []
        self._exposition = Exposition(self.registry, self._histograms)
        self._models: dict[str, ModelMeters] = {}
        ProcessCollector(registry=self.registry)
        self.build = Info("llama_gateway_build", "Versions of the gateway and of its engine.", registry=self.registry)
        self.build.info({"version": __version__, "engine": ""})
        self._declare_requests()
        self._declare_budgets()
        self._declare_tokens()
        self._declare_engines()
        self._declare_memory()

    def _counter(self, name: str, about: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"llama_gateway_{name}", about, tuple(labels), registry=self.registry)

    def _gauge(self, name: str, about: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"llama_gateway_{name}", about, tuple(labels), registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"llama_gateway_{name}", about, label="model", buckets=buckets)
        self._histograms.append(histogram)
        return histogram

    def _declare_requests(self) -> None:
        self.requests = self._counter("requests", "Requests by how they ended.", ("model", "endpoint", "outcome"))
        self.rejected = self._counter("rejected", "Requests refused before an engine saw them.", ("reason",))
        self.context_overflow = self._counter("context_overflow", "Requests over the context of a slot.", ("model",))
        self.request_log_lost = self._counter("request_log_lost", "Records that could not be written.", ("what",))
        for what in ("lines", "bodies"):
            self.request_log_lost.labels(what)
        self.client_disconnects = self._counter("client_disconnects", "Clients that left before their answer ended.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to the first token of its answer.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Mean time between the tokens of one answer.", _TOKEN_LATENCY
        )
        self.request_duration = self._histogram(
            "request_duration_seconds", "From the request's arrival to the end of its answer.", _SECONDS
        )
        self.queue_wait = self._histogram("queue_wait_seconds", "Time spent waiting for a slot.", _FEWER_SECONDS)
        self.load_wait = self._histogram("load_wait_seconds", "Time spent waiting for the model.", _LOAD_SECONDS)
        self.prefill = self._histogram(
            "prefill_seconds", "From the sending of a request to its engine to the first token.", _FEWER_SECONDS
        )
        self.decode = self._histogram(
            "decode_seconds", "From the first token to the end of the answer.", _FEWER_SECONDS
        )
        self.queue_depth = self._gauge("queue_depth", "Requests waiting for a slot.", ("model",))
        self.slots = self._gauge("slots", "Slots of the engine, by state busy or idle.", ("model", "state"))

    def _declare_budgets(self) -> None:
        self.budget_used = self._gauge("budget_used", "What a key has used of a limit.", ("key", "window"))
        self.budget_limit = self._gauge("budget_limit", "What a key may use.", ("key", "window"))

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
        self.prompt_rates = self._histogram(
            "request_prompt_tokens_per_second", "Prefill speed of a request, by its engine.", _PROMPT_RATE
        )
        self.generation_rates = self._histogram(
            "request_generation_tokens_per_second", "Decode speed of a request, by its engine.", _GENERATION_RATE
        )
        self.kv_tokens = self._gauge(
            "kv_tokens", "Tokens of context: promised to requests in flight, and in all slots.", ("model", "kind")
        )

    def _declare_engines(self) -> None:
        self.model_state = self._gauge("model_state", "1 for the state that the model is in.", ("model", "state"))
        self.engine_restarts = self._counter(
            "engine_restarts", "Engines started again after they died.", ("model", "cause")
        )
        self.degraded = self._gauge(
            "model_degraded", "1 for a model whose engine does not run where it was planned.", ("model",)
        )
        self.step_downs = self._counter(
            "plan_step_downs", "Smaller plans made after an engine ran out of memory.", ("model",)
        )
        self.slow = self._gauge("model_slow", "1 while a model is slowed down by this cause.", ("model", "cause"))
        self.evictions = self._counter("evictions", "Models stopped to make room for another.", ("model",))
        self.engine_resident = self._gauge("engine_resident_bytes", "Resident memory of the engine.", ("model",))
        self.engine_major_faults = self._counter(
            "engine_major_page_faults", "Pages that the engine had to read from disk.", ("model",)
        )
        self.engine_device_memory = self._gauge(
            "engine_device_memory_bytes", "Device memory of the engine, by the driver.", ("model", "device")
        )
        self.engine_shared_memory = self._gauge(
            "engine_shared_memory_bytes", "RAM that the driver uses in place of device memory.", ("model",)
        )
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
        for gauge in (self.planned_memory, self.measured_memory, self.offloaded_layers, self.degraded):
            _remove(gauge, model)

    def forget_model(self, model: str) -> None:
        """A model that is no longer configured has no state."""
        self.forget_memory(model)
        for gauge in (
            self.model_state,
            self.engine_resident,
            self.engine_device_memory,
            self.engine_shared_memory,
            self.slots,
            self.queue_depth,
            self.kv_tokens,
            self.slow,
        ):
            _remove(gauge, model)

    def of(self, model: str) -> ModelMeters:
        """The collectors of a request of this model, looked up once."""
        meters = self._models.get(model)
        if meters is None:
            meters = self._models[model] = ModelMeters(self, model)
        return meters

    def watch_queue(
        self, model: str, *, waiting: Callable[[], int], busy: Callable[[], int], idle: Callable[[], int]
    ) -> None:
        """Read the figures of a queue whenever somebody asks for them, instead of at each of its moves."""
        self.queue_depth.labels(model).set_function(waiting)
        self.slots.labels(model, "busy").set_function(busy)
        self.slots.labels(model, "idle").set_function(idle)

    def expose(self, *, openmetrics: bool = False) -> bytes:
        """Prometheus' text format, or OpenMetrics."""
        return self._exposition.write(openmetrics=openmetrics)


class ModelMeters:
    """Children of the request metrics for one model: a look-up by labels costs as much as the counting itself."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._outcomes: dict[tuple[str, str], Counter] = {}
        self._keys: dict[str, KeyMeters] = {}
        self.context_overflow = metrics.context_overflow.labels(model)
        self.duration = metrics.request_duration.labels(model)
        self.time_to_first_token = metrics.time_to_first_token.labels(model)
        self.inter_token_latency = metrics.inter_token_latency.labels(model)
        self.queue_wait = metrics.queue_wait.labels(model)
        self.load_wait = metrics.load_wait.labels(model)
        self.prefill = metrics.prefill.labels(model)
        self.decode = metrics.decode.labels(model)
        self.prompt_size = metrics.prompt_size.labels(model)
        self.generation_size = metrics.generation_size.labels(model)
        self.prompt_rate = metrics.prompt_rate.labels(model)
        self.generation_rate = metrics.generation_rate.labels(model)
        self.prompt_rates = metrics.prompt_rates.labels(model)
        self.generation_rates = metrics.generation_rates.labels(model)
        # Nothing happened yet: a rate needs the zero to start from.
        for counter in (metrics.evictions, metrics.step_downs):
            counter.labels(model)
        for outcome in _OUTCOMES:
            self.outcome("chat", outcome)

    def outcome(self, endpoint: str, outcome: str) -> Counter:
        """Counts requests that ended so."""
        counter = self._outcomes.get((endpoint, outcome))
        if counter is None:
            counter = self._metrics.requests.labels(self._model, endpoint, outcome)
            self._outcomes[endpoint, outcome] = counter
        return counter

    def key(self, key: str) -> KeyMeters:
        """Counts the tokens of one key."""
        meters = self._keys.get(key)
        if meters is None:
            meters = self._keys[key] = KeyMeters(self._metrics, self._model, key)
        return meters


class KeyMeters:
    """The token counters of one model and key."""

    def __init__(self, metrics: Metrics, model: str, key: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model, key)
        self.cached_prompt_tokens = metrics.cached_prompt_tokens.labels(model, key)
        self.generation_tokens = metrics.generation_tokens.labels(model, key)


def _remove(gauge: Gauge, model: str) -> None:
    gauge.remove_by_labels({"model": model})
