"""The parts that handlers work with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request

from app.auth import ApiKey, Authenticator
from app.config import ModelCatalog, Settings
from app.metrics import Metrics
from app.proxy import Proxy
from app.scheduler import Scheduler
from app.supervisor import Supervisor


@dataclass(slots=True)
class Gateway:
    """Everything that one running gateway consists of; ``is_draining`` is set by the server when it stops."""

    settings: Settings
    catalog: ModelCatalog
    authenticator: Authenticator
    supervisor: Supervisor
    scheduler: Scheduler
    metrics: Metrics
    proxy: Proxy
    is_draining: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))


def gateway_of(request: Request) -> Gateway:
    """The gateway that this request came to."""
    return cast(Gateway, request.app.state.gateway)


def key_of(request: Request) -> ApiKey:
    """The key of this request; raises InvalidApiKey."""
    return gateway_of(request).authenticator.authenticate(request.scope["headers"])
