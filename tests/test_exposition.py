"""What a scraper reads: both formats valid, the right one on request, cheap, and never more series than configured."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Info, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from app.exposition import Exposition, wants_openmetrics
from app.histogram import Histogram
from app.metrics import Metrics

_PROMETHEUS_ASKS = (
    "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


def samples(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def awkward_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    odd = Gauge("odd", 'A "gauge" with \\ and\na line.', ["name"], registry=registry)
    for value, name in ((math.nan, 'q"'), (math.inf, "b\\"), (-math.inf, "n\nl"), (1e-7, "é"), (3, ""), (1e21, "x")):
        odd.labels(name).set(value)
    Counter("some", "Some.", registry=registry).inc(2)
    Info("build", "Build.", registry=registry).info({"version": "1"})
    return registry


def test_the_text_says_what_the_librarys_own_says() -> None:
    registry = awkward_registry()
    ours, theirs = Exposition(registry).write(openmetrics=False).decode(), generate_latest(registry).decode()
    assert {str(item) for item in samples(read_text(ours)).items()} == {
        str(item) for item in samples(read_text(theirs)).items()
    }
    assert {line for line in ours.splitlines() if line.startswith("# TYPE")} == {
        line for line in theirs.splitlines() if line.startswith("# TYPE") and "_created" not in line
    }


def test_openmetrics_says_what_the_librarys_own_says() -> None:
    registry = awkward_registry()
    ours, theirs = Exposition(registry).write(openmetrics=True).decode(), generate_openmetrics(registry).decode()
    assert ours.endswith("# EOF\n")
    assert {str(item) for item in samples(read_openmetrics(ours)).items()} == {
        str(item) for item in samples(read_openmetrics(theirs)).items()
    }


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize("values", [[], [0.5], [0.7, 1, 1, 3, 1e9], [0.0, 21]])
def test_a_histogram_says_what_the_librarys_would_say(openmetrics: bool, values: list[float]) -> None:
    registry = CollectorRegistry()
    theirs = LibraryHistogram("long", "Long.", ["model"], buckets=(0.5, 1, 20), registry=registry).labels('m"')
    histogram = Histogram("long", "Long.", label="model", buckets=(0.5, 1, 20))
    ours = histogram.labels('m"')
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    read = read_openmetrics if openmetrics else read_text
    written = Exposition(CollectorRegistry(), [histogram]).write(openmetrics=openmetrics).decode()
    wanted = samples(read_text(generate_latest(registry).decode()))
    assert samples(read(written)) == wanted


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (_PROMETHEUS_ASKS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;q=0.2, text/plain;q=0.9", False),
        ("text/plain;version=0.0.4", False),
        ("*/*", False),
        ("", False),
        ("application/openmetrics-text;q=abc", False),
    ],
)
def test_who_asks_for_openmetrics_gets_it(accept: str, expected: bool) -> None:
    assert wants_openmetrics(accept) is expected


def test_promtool_finds_nothing_to_complain_about(promtool: str) -> None:
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=busy_metrics().expose(), capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def busy_metrics(*, models: int = 8, keys: int = 20) -> Metrics:
    """Every series that so many models and keys can have."""
    metrics = Metrics()
    for model in (f"model-{number}" for number in range(models)):
        meters = metrics.of(model)
        for outcome in ("ok", "rejected", "failed", "client_gone"):
            meters.outcome("chat", outcome).inc()
        for key in range(keys):
            of_key = meters.key(f"key-{key}")
            for counter in (of_key.prompt_tokens, of_key.cached_prompt_tokens, of_key.generation_tokens):
                counter.inc()
        for state in ("stopped", "starting", "ready", "stopping", "failed"):
            metrics.model_state.labels(model, state).set(0)
        for part in ("weights", "experts", "kv_cache", "state", "compute"):
            for device in ("CUDA0", "host"):
                metrics.planned_memory.labels(model, device, part).set(1)
                metrics.measured_memory.labels(model, device, part).set(1)
        metrics.watch_queue(model, waiting=lambda: 0, busy=lambda: 1, idle=lambda: 2)
        metrics.kv_tokens.labels(model, "promised").set(0)
        metrics.kv_tokens.labels(model, "capacity").set(0)
    for key in range(keys):
        for window in ("requests_per_minute", "tokens_per_minute", "requests_per_day", "tokens_per_day"):
            metrics.budget_used.labels(f"key-{key}", window).set(1)
            metrics.budget_limit.labels(f"key-{key}", window).set(1)
    return metrics


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_scrape_of_eight_models_and_twenty_keys_costs_at_most_15_ms(openmetrics: bool) -> None:
    metrics = busy_metrics()
    metrics.expose(openmetrics=openmetrics)
    costs = []
    for _ in range(15):
        started = time.process_time()
        metrics.expose(openmetrics=openmetrics)
        costs.append(time.process_time() - started)
    assert min(costs) <= 0.015, [round(cost * 1000, 1) for cost in costs]
