"""Why a model is in the state that it is in: one sentence. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.process import State
from app.events import Event, EventKind
from app.supervisor import ModelStatus

_NEVER = "Not loaded; its first request loads it."
_ENDED = {EventKind.EVICTION: "Stopped", EventKind.UNLOAD: "Unloaded"}


@dataclass(frozen=True, slots=True)
class Why:
    """The sentence, and since when it holds in Unix time (None: not known)."""

    text: str
    since: float | None = None


def why(status: ModelStatus, last: Event | None) -> Why:
    """``last`` is the last thing that happened to the model."""
    if status.circuit is not None:
        return _elsewhere(status)
    if status.state is State.FAILED:
        return _failed(status, last)
    if status.state is State.STARTING:
        return _starting(last)
    if status.state is State.READY:
        return _ready(status, last)
    if status.state is State.STOPPING:
        return Why("Stopping.")
    if last is not None and last.kind in _ENDED:
        return Why(f"{_ENDED[last.kind]}: {last.message[0].lower()}{last.message[1:]}", last.at)
    return Why(_NEVER)


def _elsewhere(status: ModelStatus) -> Why:
    if status.state is State.READY:
        return Why("Answered by another server.")
    if status.failure is not None:
        return Why(f"The other server cannot be used: {status.failure.public.rstrip('.')}.")
    return Why("Its server has not been asked yet; the first request does.")


def _ready(status: ModelStatus, last: Event | None) -> Why:
    """It serves; as planned at first or by a smaller plan, and perhaps something else than its load happened last."""
    text = "Serving."
    if status.plan is not None and status.plan.steps:
        lowered = ", ".join(f"{step.setting} {step.value}" for step in status.plan.steps)
        text = f"Serving by a smaller plan than at first: {lowered}."
    if status.plan is not None and status.plan.degraded is not None:
        text += " Not all of it is where it was planned, so it is slower than it should be."
    if last is None:
        return Why(text)
    return Why(text if last.kind is EventKind.LOAD else f"{text} {last.message}", last.at)


def _starting(last: Event | None) -> Why:
    if last is not None and last.kind is EventKind.RESTART:
        return Why(last.message, last.at)
    if last is not None and last.kind is EventKind.STEP_DOWN:
        return Why(f"Loading again: {last.message}", last.at)
    return Why("Loading.")


def _failed(status: ModelStatus, last: Event | None) -> Why:
    if last is not None and last.kind is EventKind.FAILED:
        return Why(last.message, last.at)
    public = status.failure.public if status.failure is not None else "the engine does not start"
    return Why(f"It cannot be started: {public}.")
