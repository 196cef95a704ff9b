"""Writes dashboards/llama-gateway.json: python deploy/grafana/dashboard.py

The panels are a table here, so that a change is one line and a review can read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TARGET = Path(__file__).parent / "dashboards" / "llama-gateway.json"
_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_BOX = 'instance=~"$instance"'
_MODEL = f'{_BOX}, model=~"$model"'


@dataclass(frozen=True)
class Panel:
    """``queries`` are legend → PromQL, ``$`` standing for the selection by instance and model, ``@`` by instance."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    about: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def _quantiles(metric: str) -> dict[str, str]:
    buckets = f"sum by (model, le) (rate(llama_gateway_{metric}_bucket{{$}}[$__rate_interval]))"
    return {f"{{{{model}}}} p{q * 100:g}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.95)}


def _median(metric: str) -> str:
    return f"histogram_quantile(0.5, sum by (le) (rate(llama_gateway_{metric}_bucket{{$}}[$__rate_interval])))"


def _mean(metric: str) -> str:
    parts = (f"sum(rate(llama_gateway_{metric}_{part}{{$}}[$__rate_interval]))" for part in ("sum", "count"))
    return " / ".join(parts)


_ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    ("Is it up?", (
        Panel("Gateway", {"{{instance}}": 'up{job="llama-gateway", @}'}, kind="stat", width=4,
              options={"mappings": {"0": ("down", "red"), "1": ("up", "green")}}),
        Panel("Models", {"{{model}} {{state}}": "llama_gateway_model_state{$} == 1"}, kind="stat", width=12,
              about="The state that each model is in; stopped is normal, the next request loads it.",
              options={"name_only": True}),
        Panel("Version", {"{{version}} · {{engine}}": "llama_gateway_build_info{@}"}, kind="stat", width=8,
              options={"name_only": True}),
        Panel("Requests by how they ended", {"{{outcome}}":
              "sum by (outcome) (rate(llama_gateway_requests_total{$}[$__rate_interval]))"}, "reqps", stacked=True),
        Panel("Engines started again", {"{{model}} {{cause}}":
              "sum by (model, cause) (increase(llama_gateway_engine_restarts_total{$}[$__range]))"},
              kind="bargauge", about="After a death, in the time shown; 0 is good."),
        Panel("Evictions and smaller plans", {
              "{{model}} evicted": "sum by (model) (increase(llama_gateway_evictions_total{$}[$__range]))",
              "{{model}} stepped down": "sum by (model) (increase(llama_gateway_plan_step_downs_total{$}[$__range]))"},
              kind="bargauge"),
    )),
    ("Is it fast?", (
        Panel("Time to first token", _quantiles("time_to_first_token_seconds"), "s"),
        Panel("What it is made of", {
              "load": _mean("load_wait_seconds"), "queue": _mean("queue_wait_seconds"),
              "prefill": _mean("prefill_seconds")}, "s", stacked=True, about="Mean of all requests."),
        Panel("Time between tokens", _quantiles("inter_token_latency_seconds"), "s"),
        Panel("Writing, tokens/s of one answer",
              {"{{model}}": "model:llama_gateway_generation_tokens_per_second:mean5m{$}"},
              about="By the engine's own clock."),
        Panel("Reading prompts, tokens/s", {"{{model}}": "model:llama_gateway_prompt_tokens_per_second:mean5m{$}"},
              about="By the engine's own clock; what was in the cache does not count."),
        Panel("Speed against its own last day",
              {"{{model}}": "model:llama_gateway_generation_tokens_per_second:ratio_to_base{$}"}, "percentunit",
              about="Half of it means heat, paging, or another program on the device."),
        Panel("All answers together, tokens/s",
              {"{{model}}": "sum by (model) (rate(llama_gateway_generation_tokens_total{$}[$__rate_interval]))"},
              stacked=True),
        Panel("Slots and queue", {
              "{{model}} busy": 'llama_gateway_slots{$, state="busy"}',
              "{{model}} waiting": "llama_gateway_queue_depth{$}",
              "{{model}} all": "sum by (model) (llama_gateway_slots{$})"}),
        Panel("Slowed down", {"{{model}} {{cause}}": "llama_gateway_model_slow{$}",
              "{{model}} pages/s from disk": "rate(llama_gateway_engine_major_page_faults_total{$}[$__rate_interval])"},
              about="What the gateway takes for the cause: GET /admin/models has the figures."),
    )),
    ("What fills the memory?", (
        Panel("Planned", {"{{device}} {{model}} {{part}}":
              'sum by (device, model, part) (llama_gateway_model_memory_planned_bytes{$, part!~"total|reserve|left"})'},
              "bytes", stacked=True),
        Panel("Measured by the engines", {"{{device}} {{model}} {{part}}":
              "sum by (device, model, part) (llama_gateway_model_memory_measured_bytes{$})"}, "bytes", stacked=True),
        Panel("Free", {"{{device}}": "device:llama_gateway_memory_free:bytes{@}",
              "{{device}} of": "device:llama_gateway_memory_total:bytes{@}"}, "bytes"),
        Panel("Engines, by the system and the driver", {"{{model}} {{device}}":
              'label_replace(llama_gateway_engine_resident_bytes{$}, "device", "RAM", "", "") '
              "or llama_gateway_engine_device_memory_bytes{$}",
              "{{model}} shared": "llama_gateway_engine_shared_memory_bytes{$}"}, "bytes"),
        Panel("Layers on devices", {"{{model}} {{kind}}": "llama_gateway_offloaded_layers{$}",
              "{{model}} not where planned": "llama_gateway_model_degraded{$}"}, kind="bargauge"),
        Panel("Context promised, of all slots", {"{{model}}":
              'llama_gateway_kv_tokens{$, kind="promised"} / ignoring (kind) '
              '(llama_gateway_kv_tokens{$, kind="capacity"} > 0)'}, "percentunit"),
    )),
    ("Who uses it?", (
        Panel("Tokens written, by key", {"{{key}}":
              "sum by (key) (rate(llama_gateway_generation_tokens_total{$}[$__rate_interval]))"}, stacked=True),
        Panel("Tokens read, by key", {"{{key}}":
              "sum by (key) (rate(llama_gateway_prompt_tokens_total{$}[$__rate_interval]))"}, stacked=True),
        Panel("Prompts from the cache", {"{{model}}":
              "sum by (model) (rate(llama_gateway_cached_prompt_tokens_total{$}[$__rate_interval])) "
              "/ sum by (model) (rate(llama_gateway_prompt_tokens_total{$}[$__rate_interval]))"}, "percentunit"),
        Panel("Budgets used", {"{{key}} {{window}}": "key:llama_gateway_budget_used:ratio{@}"}, "percentunit",
              kind="bargauge", width=12),
        Panel("Sizes of requests, median", {
              "prompt": _median("request_prompt_tokens"), "answer": _median("request_generation_tokens")}, width=12),
    )),
    ("What was refused, and why?", (
        Panel("Refused", {"{{reason}}": "sum by (reason) (rate(llama_gateway_rejected_total{@}[$__rate_interval]))"},
              "reqps", stacked=True, about="By the code that the client was given."),
        Panel("Over the context of a slot", {"{{model}}":
              "sum by (model) (rate(llama_gateway_context_overflow_total{$}[$__rate_interval]))"}, "reqps"),
        Panel("Clients that left, records lost", {
              "left": "sum(rate(llama_gateway_client_disconnects_total{@}[$__rate_interval]))",
              "{{what}} lost": "sum by (what) (rate(llama_gateway_request_log_lost_total{@}[$__rate_interval]))"},
              "reqps"),
    )),
)  # fmt: skip


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for title, panels in _ROWS:
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1}}  # fmt: skip
        number, y, x, previous = number + 1, y + 1, 0, 0
        for panel in panels:
            height = 4 if panel.kind == "stat" else 8
            if x + panel.width > _WIDTH:
                x, y = 0, y + previous
            yield _panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": height}}
            number, x, previous = number + 1, x + panel.width, height
        y += previous


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "targets": [
            {"refId": chr(65 + place), "datasource": _SOURCE, "expr": _selected(query), "legendFormat": legend,
             "instant": panel.kind != "timeseries"}
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }  # fmt: skip


def _selected(query: str) -> str:
    return query.replace("{$", "{" + _MODEL).replace("@}", _BOX + "}")


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"stacking": stacking, "fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
    if mappings := panel.options.get("mappings"):
        texts = {value: {"text": text, "color": color} for value, (text, color) in mappings.items()}
        defaults["mappings"] = [{"type": "value", "options": texts}]
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    shown = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return shown | {"textMode": "name" if panel.options.get("name_only") else "auto", "colorMode": "value"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {"name": name, "type": "query", "datasource": _SOURCE, "query": {"query": query, "refId": name},
            "refresh": 2, "includeAll": True, "allValue": ".*", "multi": True, "sort": 1,
            "current": {"text": "All", "value": "$__all"}}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON."""
    return {
        "title": "llama-gateway",
        "uid": "llama-gateway",
        "schemaVersion": 39,
        "tags": ["llama-gateway", "llm"],
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("instance", 'label_values(up{job="llama-gateway"}, instance)'),
                _variable("model", 'label_values(llama_gateway_model_state{instance=~"$instance"}, model)'),
            ]
        },
        "panels": list(_panels()),
    }


def main() -> None:
    """Write the file."""
    _TARGET.write_text(json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
