"""What the supervisor tells of its engines: a log line, a counter and an event, each written in one place."""

from __future__ import annotations

import logging

from app.engine.process import EngineExit
from app.events import EventKind, EventLog
from app.metrics import Metrics
from app.offload import OffloadPlan
from app.offload.step_down import MOST_STEPS
from app.supervisor.status import Failure

_log = logging.getLogger(__name__)

_LINES_LOGGED = 10


class Chronicle:
    """Tells the log, the metrics and the history of events."""

    def __init__(self, metrics: Metrics, events: EventLog) -> None:
        self._metrics = metrics
        self._events = events

    def forgotten(self, model_id: str) -> None:
        """The model is no longer configured."""
        self._metrics.forget_model(model_id)
        self._events.forget_model(model_id)

    def loaded(self, model_id: str, seconds: float) -> None:
        """The engine serves, after so many seconds of loading."""
        self._events.record(EventKind.LOAD, f"Ready after {seconds:.1f} s.", model=model_id, seconds=seconds)

    def idle(self, model_id: str, limit_seconds: float | None) -> None:
        """The engine stops since nobody used it."""
        message = f"Nobody used it for {limit_seconds or 0:g} s."
        self._events.record(EventKind.UNLOAD, message, model=model_id, cause="idle", seconds=limit_seconds)

    def unloading(self, model_id: str) -> None:
        """An operator wants it stopped."""
        self._events.record(EventKind.UNLOAD, "An operator asked for it.", model=model_id, cause="operator")

    def evicted(self, model_id: str, *, made_room_for: str) -> None:
        """The engine was stopped so that another one fits."""
        self._metrics.evictions.labels(model_id).inc()
        # Who may use this model need not know the name of the other.
        message, detail = "Another model needed the room.", f"It was {made_room_for}."
        self._events.record(EventKind.EVICTION, message, model=model_id, cause="memory", detail=detail)

    def server_failed(self, model_id: str, problem: str, retry_seconds: float) -> None:
        """The server elsewhere that has the model is not asked for a while."""
        _log.warning("model %s: its server is not asked for a while: %s", model_id, problem)
        message = "Its server failed and is not asked for now."
        self._events.record(
            EventKind.FAILED, message, model=model_id, cause="remote", seconds=retry_seconds, detail=problem
        )

    def server_answers(self, model_id: str) -> None:
        """The server elsewhere works again."""
        _log.info("model %s: its server answers again", model_id)
        self._events.record(EventKind.LOAD, "Its server answers again.", model=model_id, cause="remote")

    def stepped_down(self, model_id: str, plan: OffloadPlan, ended: EngineExit) -> None:
        """The engine ran out of memory and is started by a smaller plan."""
        step = plan.steps[-1]
        setting = f"{step.setting} {step.value}"
        _log.warning("model %s: now with %s (%s). %s", model_id, setting, step.because, ended.sentence)
        self._metrics.step_downs.labels(model_id).inc()
        self._events.record(
            EventKind.STEP_DOWN,
            f"{ended.public} Now with {setting} (step {len(plan.steps)} of at most {MOST_STEPS}).",
            model=model_id,
            cause=ended.cause.value,
            detail=f"{step.because}. {ended.sentence}",
        )

    def degraded(self, model_id: str, reason: str) -> None:
        """The engine serves, but not where it was planned."""
        _log.warning("model %s is degraded: %s", model_id, reason)
        message = "Not all of it is where it was planned, so it is slower than it should be."
        self._events.record(EventKind.DEGRADED, message, model=model_id, cause="device", detail=reason)

    def restarting(self, model_id: str, ended: EngineExit, delay_seconds: float) -> None:
        """The engine died and is started again."""
        _log.warning("model %s: %s Starting it again in %.1f s.", model_id, ended.sentence, delay_seconds)
        self._metrics.engine_restarts.labels(model_id, ended.cause.value).inc()
        self._events.record(
            EventKind.RESTART,
            f"{ended.public} Starting it again in {delay_seconds:.1f} s.",
            model=model_id,
            cause=ended.cause.value,
            seconds=delay_seconds,
            detail=ended.sentence,
        )

    def failed(self, model_id: str, failure: Failure, retry_seconds: float) -> None:
        """The model is given up for so many seconds."""
        _log.error("model %s cannot be started: %s", model_id, failure.reason)
        for line in failure.log_tail[-_LINES_LOGGED:]:
            _log.info("model %s said: %s", model_id, line)
        self._events.record(
            EventKind.FAILED,
            f"It cannot be started: {failure.public[:1].lower()}{failure.public[1:]}.",
            model=model_id,
            cause=failure.cause.value if failure.cause is not None else None,
            seconds=retry_seconds,
            detail=failure.reason,
        )
