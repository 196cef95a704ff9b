"""The parts that handlers work with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request

from app.api.front_door import DoorRules
from app.auth import ApiKey, Authenticator
from app.config import ModelCatalog, Settings
from app.errors import ConfigError
from app.events import EventKind, EventLog
from app.metrics import Metrics
from app.observers import Observers
from app.proxy import Proxy
from app.scheduler import Scheduler
from app.supervisor import Changes, Supervisor

ReadSettings = Callable[[], Settings]
"""Reads the configuration as it is now; raises ConfigError."""


@dataclass(slots=True)
class Gateway:
    """Everything that one running gateway consists of; ``is_draining`` is set by the server when it stops."""

    settings: Settings
    catalog: ModelCatalog
    authenticator: Authenticator
    supervisor: Supervisor
    scheduler: Scheduler
    metrics: Metrics
    events: EventLog
    proxy: Proxy
    is_draining: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))
    read_settings: ReadSettings | None = None
    observers: Observers | None = None
    door: DoorRules = field(init=False)
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.door = DoorRules.of(self.settings)

    async def reload(self) -> Reload:
        """Read the configuration again and go over to it, touching only what changed.

        Raises ConfigError or ModelFileError for one that cannot be used; then everything stays as it was.
        """
        if self.read_settings is None:
            raise ConfigError("This gateway was started without a configuration file; there is nothing to reload.")
        async with self._reloading:
            settings = await asyncio.to_thread(self.read_settings)
            refuse_open_door(settings)
            catalog = ModelCatalog(settings)
            changes = await self.supervisor.apply(catalog, settings.memory)
            fixed = [name for name in _FIXED if getattr(settings, name) != getattr(self.settings, name)]
            if any(getattr(settings.server, key) != getattr(self.settings.server, key) for key in _FIXED_OF_SERVER):
                fixed.append("the address and the certificate in server")
            self.settings, self.catalog, self.proxy.catalog = settings, catalog, catalog
            self.authenticator = Authenticator(settings.keys)
            self.door = DoorRules.of(settings)
            done = Reload(changes, tuple(fixed))
            self.events.record(EventKind.RELOAD, "The configuration was read again.", detail=done.summary())
            return done


@dataclass(frozen=True, slots=True)
class Reload:
    """What a reload changed; ``needs_restart`` names the settings that only a new start of the gateway can change."""

    changes: Changes
    needs_restart: tuple[str, ...]

    def summary(self) -> str:
        """One line for the log."""
        parts = [
            f"{what} {', '.join(getattr(self.changes, what))}"
            for what in ("added", "removed", "restarted", "adjusted")
            if getattr(self.changes, what)
        ]
        if self.needs_restart:
            parts.append(f"only a restart changes {', '.join(self.needs_restart)}")
        return "; ".join(parts) or "no model changed"


_FIXED = ("engine", "images", "quota", "request_log", "state_dir", "telemetry")
_FIXED_OF_SERVER = ("host", "port", "tls_certificate", "tls_key")


def refuse_open_door(settings: Settings) -> None:
    """Raise ConfigError for an address that the network reaches and no keys."""
    host = settings.server.host
    if not settings.server.is_loopback and not settings.keys:
        raise ConfigError(
            f"Listening on {host} would let everybody on the network use this gateway, since no keys are configured; "
            "run `llama-gateway keys new NAME` and add the printed line, or listen on 127.0.0.1."
        )


def gateway_of(request: Request) -> Gateway:
    """The gateway that this request came to."""
    return cast(Gateway, request.app.state.gateway)


def key_of(request: Request) -> ApiKey:
    """The key of this request; raises InvalidApiKey."""
    return gateway_of(request).authenticator.authenticate(request.scope["headers"])
