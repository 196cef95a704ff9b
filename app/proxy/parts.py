"""What every exchange works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.images import Images
from app.metrics import Metrics
from app.quota import Quota
from app.request_record import Observer
from app.scheduler import Affinities, Scheduler
from app.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the gateway that a request passes through."""

    supervisor: Supervisor
    scheduler: Scheduler
    metrics: Metrics
    quota: Quota
    images: Images
    observers: tuple[Observer, ...] = ()
    affinities: Affinities = field(default_factory=Affinities)
