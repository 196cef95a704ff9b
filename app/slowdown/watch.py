"""The effects of a slow-down: an event, a gauge, a line in the log, and the reason for whoever asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from app.events import EventKind, EventLog
from app.metrics import Metrics
from app.request_record import RequestRecord
from app.slowdown.detector import Detector, Look, Slowdown

_log = logging.getLogger(__name__)


class SlowdownWatch:
    """One detector per model; the only writer of the gauge of slow models."""

    def __init__(self, metrics: Metrics, events: EventLog) -> None:
        self._metrics = metrics
        self._events = events
        self._detectors: dict[str, Detector] = {}
        self._shown: dict[tuple[str, Slowdown], str] = {}

    def observe(self, record: RequestRecord) -> None:
        """One request has ended."""
        if record.generation_tokens_per_second is None:
            return
        self._detector(record.model).answered(
            record.generation_tokens_per_second,
            tokens=record.generated_tokens,
            context_tokens=record.prompt_tokens + record.generated_tokens,
            busy=record.busy_slots,
        )
        self._show(record.model)

    def look(self, model: str, *, engine: object, placement: object, look: Look) -> None:
        """The footprint of a model's ready engine; ``engine`` names this one life of it."""
        detector = self._detector(model)
        detector.begin(engine, placement)
        detector.looked(look)
        self._show(model)

    def rest(self, model: str) -> None:
        """The model is not loaded: nothing slows it down."""
        self._detector(model).rest()
        self._show(model)

    def reasons(self, model: str) -> Mapping[str, str]:
        """Cause → sentence with the figures, of what slows the model down now."""
        return {cause.value: reason for cause, reason in self._detector(model).findings.items()}

    def introduce(self, model: str) -> None:
        """Show that nothing is wrong with it, unless something is."""
        for cause in Slowdown:
            self._metrics.slow.labels(model, cause.value).set((model, cause) in self._shown)

    def forget_models_but(self, models: set[str]) -> None:
        """What a reload removed."""
        for model in self._detectors.keys() - models:
            del self._detectors[model]
            for cause in Slowdown:
                self._shown.pop((model, cause), None)

    def _detector(self, model: str) -> Detector:
        return self._detectors.setdefault(model, Detector())

    def _show(self, model: str) -> None:
        findings = self._detector(model).findings
        for cause in Slowdown:
            reason, before = findings.get(cause), self._shown.get((model, cause))
            if (reason is None) == (before is None):
                continue
            if reason is not None:
                self._shown[model, cause] = reason
                self._tell(model, cause, f"{model} is slowed down: {reason}.")
            else:
                del self._shown[model, cause]
                self._tell(model, cause, f"{model} is no longer slowed down ({cause.value.replace('_', ' ')}).")
            self._metrics.slow.labels(model, cause.value).set(reason is not None)

    def _tell(self, model: str, cause: Slowdown, message: str) -> None:
        _log.warning("%s", message)
        self._events.record(EventKind.SLOW_DOWN, message, model=model, cause=cause.value)
