"""Manage the models, with a key that says ``admin: true``; without any keys, from this machine alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from app.api.gateway import Gateway, gateway_of, key_of
from app.config import ModelConfig
from app.errors import InvalidValue, NotAdmin, RequestError, SetupError
from app.logs import redact
from app.supervisor import ModelStatus

_DEFAULT_LINES = 100
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
_MOST_LINES = 400


async def list_models(request: Request) -> JSONResponse:
    """``GET /admin/models``: every model with its state, load, failures and memory."""
    gateway = as_admin(request)
    return JSONResponse({"object": "list", "data": [_document(gateway, status) for status in gateway.supervisor]})


async def retrieve_model(request: Request) -> JSONResponse:
    """``GET /admin/models/{id}``."""
    gateway, model = _of(request)
    return JSONResponse(_document(gateway, gateway.supervisor.status(model)))


async def load_model(request: Request) -> JSONResponse:
    """``POST /admin/models/{id}/load``: begins at once, whatever failed before; answers 202 without waiting."""
    gateway, model = _of(request)
    gateway.supervisor.load(model)
    return JSONResponse(_document(gateway, gateway.supervisor.status(model)), status_code=202)


async def unload_model(request: Request) -> JSONResponse:
    """``POST /admin/models/{id}/unload``: its requests end first; the next request loads it again."""
    gateway, model = _of(request)
    gateway.supervisor.unload(model)
    return JSONResponse(_document(gateway, gateway.supervisor.status(model)), status_code=202)


async def show_plan(request: Request) -> JSONResponse:
    """``GET /admin/models/{id}/plan``: the plan that its engine runs by, with the command line, secrets left out.

    For a model that is not loaded the one by which it would be loaded now, without a command line.
    """
    gateway, model = _of(request)
    try:
        plan = await gateway.supervisor.plan(model)
    except SetupError as error:
        raise RequestError(str(error)) from error
    return JSONResponse(plan.document(argv=_redacted(gateway.supervisor.status(model).argv)))


async def show_logs(request: Request) -> JSONResponse:
    """``GET /admin/models/{id}/logs?lines=100``: the engine's last lines, secrets left out."""
    gateway, model = _of(request)
    asked = request.query_params.get("lines", str(_DEFAULT_LINES))
    if not asked.isdecimal() or not 1 <= int(asked[:9]) <= _MOST_LINES:
        raise InvalidValue(f"'lines' must be a number from 1 to {_MOST_LINES}.", param="lines")
    lines = [redact(line) for line in gateway.supervisor.log_tail(model, int(asked))]
    return JSONResponse({"model": model.id, "lines": lines})


async def reload(request: Request) -> JSONResponse:
    """``POST /admin/reload``: the configuration file is read again; 400 with every reason when it cannot be used."""
    gateway = as_admin(request)
    try:
        done = await gateway.reload()
    except SetupError as error:
        # An operator asks: the message with file, line and key is for them.
        raise RequestError(f"The configuration is not used, the old one stays in force: {error}") from error
    return JSONResponse({"changes": asdict(done.changes), "needs_restart": list(done.needs_restart)})


def as_admin(request: Request) -> Gateway:
    """The gateway, if the caller may manage it; raises InvalidApiKey or NotAdmin.

    Without keys callers on this machine are admins, except web pages other than our own: a browser names their origin.
    """
    gateway, key = gateway_of(request), key_of(request)
    if gateway.settings.keys:
        if not key.admin:
            raise NotAdmin(f"The key {key.name!r} may not manage the gateway; give it 'admin: true' to allow that.")
    elif not _is_local(request) or not _is_own_page_or_program(request):
        raise NotAdmin("Without keys only programs on this machine may manage the gateway; configure an admin key.")
    return gateway


def _is_own_page_or_program(request: Request) -> bool:
    """The front door has seen to it that the host is a name of ours, so that a page of that origin is ours too."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin.lower()).netloc != request.headers.get("host", "").lower():
        return False
    # Browsers also say so of requests that name no origin, such as those for an image.
    return request.headers.get("sec-fetch-site", "none") in {"same-origin", "none"}


def _is_local(request: Request) -> bool:
    """A proxy on this machine speaks for others."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _of(request: Request) -> tuple[Gateway, ModelConfig]:
    gateway = as_admin(request)
    return gateway, gateway.catalog.resolve(request.path_params["model_id"])


def _redacted(argv: Sequence[str]) -> list[str]:
    """A command line without what follows a key's flag."""
    secret = {place + 1 for place, word in enumerate(argv) if word in {"--api-key", "--api-key-file"}}
    return [redact(word) if place not in secret else "[redacted]" for place, word in enumerate(argv)]


def _document(gateway: Gateway, status: ModelStatus) -> dict[str, Any]:
    model, failure = status.model, status.failure
    return {
        "id": model.id,
        "aliases": list(model.aliases),
        "path": None if model.path is None else str(model.path),
        "url": None if model.remote is None else model.remote.url,
        "state": status.state.value,
        "circuit": status.circuit,
        "pid": status.pid,
        "context_tokens": status.context_tokens,
        "slots": {"total": status.slots, "busy": gateway.scheduler.in_flight(model.id)},
        "requests": {
            "in_flight": status.users,
            "waiting_for_slot": gateway.scheduler.waiting(model.id),
            "waiting_for_model": status.waiting,
        },
        "idle_seconds": _rounded(status.idle_seconds),
        "resident_seconds": _rounded(status.resident_seconds),
        "load_seconds": _rounded(status.load_seconds),
        "pin": model.pin,
        "idle_unload_seconds": model.idle_unload_seconds,
        "deaths": status.deaths,
        "degraded": status.plan and status.plan.degraded,
        "step_downs": [asdict(step) for step in status.plan.steps] if status.plan else [],
        "slow": {} if gateway.observers is None else dict(gateway.observers.slowdowns.reasons(model.id)),
        "failure": failure
        and {
            "cause": failure.cause and failure.cause.value,
            "reason": redact(failure.reason),
            "next_try_seconds": _rounded(status.next_try_seconds),
            "log": [redact(line) for line in failure.log_tail],
        },
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


_MODEL = "/admin/models/{model_id:path}"
# The longer paths first: a model's name may hold slashes.
routes: list[BaseRoute] = [
    Route("/admin/models", list_models),
    Route(f"{_MODEL}/load", load_model, methods=["POST"]),
    Route(f"{_MODEL}/unload", unload_model, methods=["POST"]),
    Route(f"{_MODEL}/plan", show_plan),
    Route(f"{_MODEL}/logs", show_logs),
    Route(_MODEL, retrieve_model),
    Route("/admin/reload", reload, methods=["POST"]),
]
