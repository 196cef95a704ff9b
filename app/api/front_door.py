"""Who may come in at all: by which name the gateway was called, and from which web page."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.error_answer import error_response
from app.config import Settings
from app.errors import GatewayError, RequestError
from app.metrics import Metrics

Headers = Sequence[tuple[bytes, bytes]]

_ANY = "*"
_PREFLIGHT_SECONDS = 600
_EXPOSED = (
    "retry-after, x-request-id, x-should-retry, x-context-limit, x-context-prompt-tokens, x-context-remaining, "
    "x-context-count, x-context-clamped, x-context-trimmed, x-context-warning, x-prompt-rounded, "
    "x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)


class UnknownHost(RequestError):
    """The gateway was called by a name that is not known to be its own, as after DNS rebinding."""

    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class OriginNotAllowed(RequestError):
    """A web page of another origin asks."""

    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


@dataclass(frozen=True, slots=True)
class DoorRules:
    """``hosts`` are names that the gateway may be called by, None for any; ``origins`` web pages that may ask."""

    hosts: frozenset[str] | None
    origins: frozenset[str]

    @classmethod
    def of(cls, settings: Settings) -> DoorRules:
        """The rules of a configuration.

        With keys a page that reached us by a name of its own has no key, so that any name will do; without keys only
        addresses, this machine's own name and those of ``server.allowed_hosts`` are ours.
        """
        server = settings.server
        is_any = _ANY in server.allowed_hosts or (bool(settings.keys) and not server.allowed_hosts)
        hosts = None if is_any else frozenset(_names(server.allowed_hosts, listening_on=server.host))
        return cls(hosts, frozenset(origin.lower().rstrip("/") for origin in server.cors_origins))

    def check_host(self, host: str) -> None:
        """Raises UnknownHost."""
        name = _without_port(host)
        # Without a name no page of that name can have been fooled.
        if self.hosts is None or not name or name in self.hosts or _is_address(name):
            return
        raise UnknownHost(
            f"This gateway does not answer to the name {name[:100]!r}; "
            "call it by its address, or add the name to server.allowed_hosts."
        )

    def check_origin(self, origin: str, host: str) -> bool:
        """Whether the page is one of another origin that may ask; raises OriginNotAllowed for one that may not."""
        origin = origin.lower().rstrip("/")
        if origin in self.origins or _ANY in self.origins:
            return True
        if urlsplit(origin).netloc == host.lower():
            return False
        raise OriginNotAllowed(
            f"Web pages of {origin[:100]!r} may not use this gateway; server.cors_origins lists those that may."
        )


class FrontDoorMiddleware:
    """Pure ASGI: refuses before anything is read, answers preflights, and marks answers for pages that may read them.

    ``rules`` is replaced at a reload.
    """

    def __init__(self, app: ASGIApp, *, rules: RulesSource, metrics: Metrics) -> None:
        self._app = app
        self._source = rules
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host, origin = _host_and_origin(scope["headers"])
        try:
            self._source.door.check_host(host)
            is_foreign = origin is not None and self._source.door.check_origin(origin, host)
        except GatewayError as error:
            self._metrics.rejected.labels(error.code or error.type).inc()
            await error_response(scope, error)(scope, receive, send)
            return
        if origin is None or not is_foreign:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await _preflight(scope, origin)(scope, receive, send)
        else:
            await self._app(scope, receive, _sending_for(origin, send))


class RulesSource(Protocol):
    """Who knows the rules as they are now."""

    @property
    def door(self) -> DoorRules:
        """The rules."""


def _host_and_origin(headers: Headers) -> tuple[str, str | None]:
    host, origin = "", None
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1")
        elif name == b"origin":
            origin = value.decode("latin-1")
    return host, origin


def _sending_for(origin: str, send: Send) -> Send:
    marks = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED.encode()),
        (b"vary", b"Origin"),
    ]

    async def send_for_page(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *marks]
        await send(message)

    return send_for_page


def _preflight(scope: Scope, origin: str) -> Response:
    """What a browser asks before the request itself; without a key, since it sends none."""
    asked = [value for name, value in scope["headers"] if name == b"access-control-request-headers"]
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": asked[0].decode("latin-1") if asked else "authorization, content-type",
            "access-control-max-age": str(_PREFLIGHT_SECONDS),
            "vary": "Origin, Access-Control-Request-Headers",
        },
    )


def _names(allowed: Iterable[str], *, listening_on: str) -> set[str]:
    """Ours for certain: nobody else can have a page answer to these in a browser on this network."""
    machine = socket.gethostname().lower()
    own = {"localhost", listening_on, machine, f"{machine}.local", socket.getfqdn().lower()}
    return {name.lower() for name in {*own, *allowed}}


def _without_port(host: str) -> str:
    """``[::1]:8080`` → ``::1``, ``box:8080`` → ``box``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
