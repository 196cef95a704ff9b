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
    if status.state is State.FAILED:
        return _failed(status, last)
    if status.state is State.STARTING:
        return _starting(last)
    if status.state is State.READY:
        return Why("Serving.", None if last is None else last.at) if _loaded(last) else _ready(last)
    if status.state is State.STOPPING:
        return Why("Stopping.")
    if last is not None and last.kind in _ENDED:
        return Why(f"{_ENDED[last.kind]}: {last.message[0].lower()}{last.message[1:]}", last.at)
    return Why(_NEVER)


def _loaded(last: Event | None) -> bool:
    return last is not None and last.kind is EventKind.LOAD


def _ready(last: Event | None) -> Why:
    """It serves, and something else than its load happened last."""
    return Why("Serving.") if last is None else Why(f"Serving. {last.message}", last.at)


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
