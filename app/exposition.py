"""The text that Prometheus reads, in its own format or in OpenMetrics, whichever the scraper asks for.

The library's writers spend 10 µs per series, most of it on labels that never change; here each series' name and labels
are written out once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from app.histogram import Histogram, escaped

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_OPENMETRICS = "application/openmetrics-text"
# Prometheus' own format has no type for these, and its counters are called as their samples are.
_TEXT_TYPES = {"counter": ("counter", "_total"), "info": ("gauge", "_info"), "unknown": ("untyped", "")}


def wants_openmetrics(accept: str) -> bool:
    """Whether an ``Accept`` header ranks OpenMetrics 1.x at least as high as plain text."""
    best = {"open": 0.0, "text": 0.0}
    for entry in accept.split(","):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        if name == _OPENMETRICS and not _is_other_version(parameters):
            best["open"] = max(best["open"], _quality(parameters))
        elif name in {"text/plain", "text/*", "*/*", ""}:
            best["text"] = max(best["text"], _quality(parameters))
    return best["open"] > 0 and best["open"] >= best["text"]


def _is_other_version(parameters: Iterable[str]) -> bool:
    versions = [value for name, _, value in (one.partition("=") for one in parameters) if name == "version"]
    return bool(versions) and not versions[0].startswith("1.")


def _quality(parameters: Iterable[str]) -> float:
    for name, _, value in (one.partition("=") for one in parameters):
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


class Exposition:
    """Writes one registry and our own histograms; keeps the constant part of each series' line."""

    def __init__(self, registry: CollectorRegistry, histograms: Sequence[Histogram] = ()) -> None:
        self._registry = registry
        self._histograms = histograms
        self._heads: dict[tuple[str, ...], str] = {}

    def write(self, *, openmetrics: bool) -> bytes:
        """Every series with its value now."""
        lines: list[str] = []
        for family in self._registry.collect():
            lines.extend(_about(family, openmetrics=openmetrics))
            lines.extend(map(self._line, family.samples))
        for histogram in self._histograms:
            lines.extend(_histogram(histogram, openmetrics=openmetrics))
        if len(self._heads) > 2 * len(lines):
            # Models that a reload removed.
            self._heads.clear()
        if openmetrics:
            lines.append("# EOF\n")
        return "".join(lines).encode()

    def _line(self, sample: Sample) -> str:
        key = (sample.name, *sample.labels.values())
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = _head(sample)
        return f"{head}{_number(sample.value)}\n"


def _about(family: Metric, *, openmetrics: bool) -> tuple[str, str]:
    kind, suffix = (family.type, "") if openmetrics else _TEXT_TYPES.get(family.type, (family.type, ""))
    return _head_lines(family.name + suffix, kind, family.documentation, openmetrics=openmetrics)


def _head_lines(name: str, kind: str, about: str, *, openmetrics: bool) -> tuple[str, str]:
    # Only OpenMetrics escapes quotes here.
    text = escaped(about) if openmetrics else about.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"


def _histogram(histogram: Histogram, *, openmetrics: bool) -> Iterator[str]:
    yield from _head_lines(histogram.name, "histogram", histogram.about, openmetrics=openmetrics)
    for label in histogram:
        for series, value in histogram.series(label):
            yield f"{series} {value}\n"


def _head(sample: Sample) -> str:
    labels = ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}} " if labels else f"{sample.name} "


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
