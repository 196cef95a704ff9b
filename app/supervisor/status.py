"""What can be told of a model."""

from __future__ import annotations

from dataclasses import dataclass

from app.backends import Circuit
from app.config import ModelConfig
from app.engine.process import State
from app.engine.report import Cause
from app.errors import SetupError
from app.gguf import Kind, ModelFacts
from app.offload import OffloadPlan
from app.supervisor.planning import kind_of
from app.supervisor.signals import GaveUp

# A model that failed for a reason that nobody thought of is not tried again before this.
_RETRY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model is given up for now.

    ``reason`` is for the operator, ``public`` for clients; ``retry_at`` is the loop's time.
    """

    reason: str
    public: str
    retry_at: float
    cause: Cause | None = None
    log_tail: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: Exception, *, now: float) -> Failure:
        """What ``error`` means for whoever asks for the model."""
        reason = str(error) or repr(error)
        if isinstance(error, GaveUp):
            ended = error.exit
            return cls(reason, ended.public.rstrip("."), now + error.retry_seconds, ended.cause, ended.log_tail)
        if isinstance(error, SetupError):
            return cls(reason, error.public.rstrip("."), now + error.retry_seconds)
        return cls(reason, "the engine does not start", now + _RETRY_SECONDS)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What the gateway knows of a model now; ``context_tokens`` is the engine's own once it is loaded.

    ``facts`` is None and ``circuit`` says whether it is asked for a model that another server has.
    ``users`` are requests that the engine works on, ``waiting`` those that wait for the model; times in seconds.
    """

    model: ModelConfig
    facts: ModelFacts | None
    state: State
    context_tokens: int
    slots: int
    pid: int | None
    users: int = 0
    waiting: int = 0
    deaths: int = 0
    failure: Failure | None = None
    next_try_seconds: float | None = None
    idle_seconds: float | None = None
    resident_seconds: float | None = None
    load_seconds: float | None = None
    plan: OffloadPlan | None = None
    argv: tuple[str, ...] = ()
    circuit: Circuit | None = None

    @property
    def kind(self) -> Kind:
        """What the model is for."""
        return kind_of(self.model, self.facts)
