"""Looks at the gateway, at most once a second however many ask: no engine is asked, nothing waits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from app import __version__
from app.api.gateway import Gateway
from app.backends import LocalBackend
from app.events import Event
from app.hardware import DeviceMemory
from app.logs import redact
from app.metrics import Metrics
from app.proxy import Phase, Progress
from app.supervisor import ModelStatus
from app.views.history import History, Point, Totals
from app.views.memory_map import Place, Resident, memory_map
from app.views.why import why

_FRESH_SECONDS = 0.9
_EVENTS_SHOWN = 50


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model as it is now; ``detail`` and ``key`` names of requests are for operators."""

    id: str
    kind: str
    is_remote: bool
    aliases: tuple[str, ...]
    state: str
    why: str
    since: float | None
    detail: str | None
    is_pinned: bool
    about: str
    placement: str | None
    context_tokens: int
    slots: int
    busy: int
    waiting: int
    waiting_for_model: int
    load_seconds: float | None
    resident_bytes: int
    answer_rate: float | None
    prompt_rate: float | None
    last_answer_rate: float | None
    last_prompt_rate: float | None
    expected_answer_rate: float | None
    expected_basis: str | None
    reasons: tuple[tuple[str, str, str], ...]
    running: tuple[Progress, ...]
    points: tuple[Point | None, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The whole gateway at one moment; ``at`` and ``started_at`` in Unix time."""

    at: float
    started_at: int
    is_draining: bool
    models: tuple[ModelView, ...]
    places: tuple[Place, ...]
    events: tuple[Event, ...]

    def document(self) -> dict[str, Any]:
        """The sample as JSON, for operators."""
        return {
            "version": __version__,
            "at": round(self.at, 3),
            "started_at": self.started_at,
            "is_draining": self.is_draining,
            "models": [_model_document(model) for model in self.models],
            "places": [_place_document(place) for place in self.places],
            "events": [event.document(for_operator=True) for event in self.events],
        }


@dataclass(frozen=True, slots=True)
class _Gauges:
    """What others have measured of each model, by its name."""

    resident_bytes: Mapping[str, float]
    answer_rates: Mapping[str, float]
    prompt_rates: Mapping[str, float]

    @classmethod
    def read(cls, metrics: Metrics) -> _Gauges:
        return cls(
            _by_label(metrics.engine_resident, "model"),
            _by_label(metrics.generation_rate, "model"),
            _by_label(metrics.prompt_rate, "model"),
        )


class Observer:
    """Takes samples of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._history = History()
        self._sample: Sample | None = None
        self._looked_at = 0.0

    def look(self) -> Sample:
        """The gateway now, or less than a second ago."""
        now = time.monotonic()
        if self._sample is None or now - self._looked_at >= _FRESH_SECONDS:
            self._looked_at = now
            self._sample = self._take(now)
        return self._sample

    def _take(self, now: float) -> Sample:
        gateway = self._gateway
        statuses, running = list(gateway.supervisor), gateway.proxy.progress()
        self._history.add(now, self._totals(statuses, running))
        gauges = _Gauges.read(gateway.metrics)
        return Sample(
            at=time.time(),
            started_at=gateway.started_at,
            is_draining=gateway.is_draining,
            models=tuple(self._model(status, running, gauges) for status in statuses),
            places=self._places(statuses, gauges.resident_bytes),
            events=tuple(gateway.events.latest(_EVENTS_SHOWN)),
        )

    def _totals(self, statuses: Iterable[ModelStatus], running: Iterable[Progress]) -> dict[str, Totals]:
        """What has ended is in the counters, what is under way in the requests themselves."""
        gateway = self._gateway
        prompt = _by_label(gateway.metrics.prompt_tokens, "model")
        answer = _by_label(gateway.metrics.generation_tokens, "model")
        for progress in running:
            prompt[progress.model_id] = prompt.get(progress.model_id, 0) + progress.prompt_tokens
            answer[progress.model_id] = answer.get(progress.model_id, 0) + progress.answer_tokens
        names = [status.model.id for status in statuses]
        scheduler = gateway.scheduler
        return {
            name: Totals(prompt.get(name, 0), answer.get(name, 0), scheduler.in_flight(name), scheduler.waiting(name))
            for name in names
        }

    def _model(self, status: ModelStatus, running: Iterable[Progress], gauges: _Gauges) -> ModelView:
        gateway, model, plan = self._gateway, status.model, status.plan
        because, point = why(status, gateway.events.last_of(model.id)), self._history.latest(model.id)
        summary = plan.summary() if plan is not None else None
        return ModelView(
            id=model.id,
            kind=status.kind.value,
            is_remote=status.circuit is not None,
            aliases=tuple(model.aliases),
            state=status.state.value,
            why=because.text,
            since=because.since,
            detail=_detail(status),
            is_pinned=model.pin,
            about=_about(status),
            placement=summary[1] if summary is not None else None,
            context_tokens=status.context_tokens,
            slots=status.slots,
            busy=gateway.scheduler.in_flight(model.id),
            waiting=gateway.scheduler.waiting(model.id),
            waiting_for_model=status.waiting,
            load_seconds=status.load_seconds,
            resident_bytes=int(gauges.resident_bytes.get(model.id, 0)),
            answer_rate=point.answer_rate if point is not None else None,
            prompt_rate=point.prompt_rate if point is not None else None,
            last_answer_rate=gauges.answer_rates.get(model.id),
            last_prompt_rate=gauges.prompt_rates.get(model.id),
            expected_answer_rate=plan.expected.decode_tokens_per_second if plan is not None else None,
            expected_basis=plan.expected.basis if plan is not None else None,
            reasons=tuple((one.setting, one.value, one.because) for one in plan.reasons) if plan is not None else (),
            running=tuple(one for one in running if one.model_id == model.id and one.phase is not Phase.WAITING),
            points=tuple(self._history.of(model.id)),
        )

    def _places(self, statuses: Iterable[ModelStatus], resident_bytes: Mapping[str, float]) -> tuple[Place, ...]:
        gateway = self._gateway
        residents = []
        for status in statuses:
            if status.plan is not None:
                backend = gateway.supervisor.backend(status.model)
                measured = backend.measured if isinstance(backend, LocalBackend) else None
                name = status.model.id
                residents.append(Resident(name, status.plan, measured, int(resident_bytes.get(name, 0))))
        ram = _by_label(gateway.metrics.ram, "kind")
        return memory_map(
            residents,
            ram_total_bytes=int(ram.get("total", 0)),
            ram_available_bytes=int(ram.get("available", 0)),
            ram_reserve_bytes=int(gateway.settings.memory.ram_reserve),
            vram_reserve_bytes=int(gateway.settings.memory.vram_reserve),
            drivers=_drivers(gateway.metrics.device_memory),
        )


def _detail(status: ModelStatus) -> str | None:
    """What an operator is told beyond what everybody is told."""
    failure = status.failure
    if failure is None:
        return status.plan.degraded if status.plan is not None else None
    return redact(failure.reason.removeprefix(failure.public).lstrip(". ")) or None


def _about(status: ModelStatus) -> str:
    facts = status.facts
    if facts is None:
        return "on another server"
    parts = [facts.architecture, f"{facts.parameters / 1e9:.3g}B parameters", facts.quantisation or ""]
    return ", ".join(part for part in parts if part)


def _drivers(gauge: MetricWrapperBase) -> list[DeviceMemory]:
    """The last background sample of every device."""
    devices: dict[str, dict[str, int]] = {}
    for family in gauge.collect():
        for sample in family.samples:
            devices.setdefault(sample.labels["device"], {})[sample.labels["kind"]] = int(sample.value)
    return [
        DeviceMemory(name, kinds.get("total", 0), kinds.get("used", 0), kinds.get("free", 0))
        for name, kinds in devices.items()
    ]


def _by_label(collector: MetricWrapperBase, label: str) -> dict[str, float]:
    """The values of a gauge or counter, summed by one label."""
    values: dict[str, float] = {}
    for family in collector.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                values[sample.labels[label]] = values.get(sample.labels[label], 0.0) + sample.value
    return values


def _model_document(model: ModelView) -> dict[str, Any]:
    document = asdict(model)
    del document["points"]
    document["running"] = [asdict(one) for one in model.running]
    document["reasons"] = [
        {"setting": setting, "value": value, "because": because} for setting, value, because in model.reasons
    ]
    return document


def _place_document(place: Place) -> dict[str, Any]:
    return asdict(place) | {
        "planned_bytes": place.planned_bytes,
        "measured_bytes": place.measured_bytes,
        "left_bytes": place.left_bytes,
    }
