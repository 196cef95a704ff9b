"""Who is told of requests that have ended: the watch for slow-downs, and what the configuration asks for."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Protocol, cast

from app.captures import CaptureFolder
from app.config import RequestLogConfig, Settings, TelemetryConfig
from app.errors import SetupError
from app.events import EventLog
from app.metrics import Metrics
from app.request_log import RequestLog
from app.request_record import Observer, RequestRecord
from app.slowdown import SlowdownWatch


class Helper(Protocol):
    """What runs beside the requests until it is cancelled."""

    async def run(self) -> None:
        """Until cancelled."""


class Passer(Helper, Protocol):
    """Passes records on to another system."""

    def observe(self, record: RequestRecord) -> None:
        """One request has ended."""


@dataclass(frozen=True, slots=True)
class Observers:
    """``captures`` is handed whole requests by the server, the others figures by the proxy."""

    slowdowns: SlowdownWatch
    log: RequestLog | None = None
    captures: CaptureFolder | None = None
    telemetry: Passer | None = None

    @classmethod
    def of(cls, settings: Settings, metrics: Metrics, events: EventLog) -> Observers:
        """Those of a configuration; raises SetupError when it asks for a package that is not there."""
        config = settings.request_log
        return cls(
            SlowdownWatch(metrics, events),
            _request_log(config, metrics),
            _captures(config, metrics),
            _telemetry(settings.telemetry),
        )

    def told(self) -> list[Observer]:
        """Who is told of each request."""
        return [one.observe for one in (self.slowdowns, self.log, self.telemetry) if one is not None]

    def helpers(self) -> list[Helper]:
        """What has to run."""
        return [one for one in (self.log, self.captures, self.telemetry) if one is not None]


def _request_log(config: RequestLogConfig, metrics: Metrics) -> RequestLog | None:
    if config.file is None:
        return None
    lost = metrics.request_log_lost.labels("lines")
    return RequestLog(None if config.is_stdout else config.file, on_lost=lost.inc)


def _captures(config: RequestLogConfig, metrics: Metrics) -> CaptureFolder | None:
    if config.bodies is None:
        return None
    lost = metrics.request_log_lost.labels("bodies")
    return CaptureFolder(config.bodies, limit_bytes=int(config.bodies_limit), on_lost=lost.inc)


def _telemetry(config: TelemetryConfig) -> Passer | None:
    if config.otlp is None:
        return None
    try:
        # Loaded when the configuration asks for it, since its packages are an extra.
        make = pkgutil.resolve_name("app.telemetry:Telemetry")
    except ModuleNotFoundError as error:
        raise SetupError(
            f"telemetry.otlp: it needs the package {error.name!r}; install llama-gateway[otel] or remove the line."
        ) from None
    return cast(Passer, make(config.otlp, traces=config.traces, metrics=config.metrics))
