"""The status page at ``/`` and ``/ui``, its files, its live stream, and the same as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from app.api.admin import as_admin
from app.api.gateway import Gateway, gateway_of, key_of
from app.errors import Draining, Overloaded, UnknownRoute
from app.views.broadcast import Broadcaster
from app.views.observer import Observer
from app.views.page import Page
from app.views.scene import Audience
from app.views.stream import LiveResponse

_MOST_WATCHERS = 100
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Everything comes from here, nothing is inline, and no other page may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Views:
    """The page, who looks for it, and who shows it to whoever watches."""

    page: Page
    observer: Observer
    broadcaster: Broadcaster

    @classmethod
    def of(cls, gateway: Gateway) -> Views:
        """The views of one gateway."""
        page, observer = Page(), Observer(gateway)
        return cls(page, observer, Broadcaster(page, look=observer.look, is_draining=lambda: gateway.is_draining))


async def show_page(request: Request) -> Response:
    """``GET /`` and ``/ui``: the frame of the page, the same for everybody; what is in it comes by the stream."""
    gateway = gateway_of(request)
    frame = _views(request).page.frame(
        base_url=f"{request.url.scheme}://{request.url.netloc}",
        has_keys=bool(gateway.settings.keys),
        # The names of the models are only for those with a key.
        model=next((model.id for model in gateway.catalog), "MODEL") if not gateway.settings.keys else "MODEL",
        speaks_anthropic=any(getattr(route, "path", "") == "/v1/messages" for route in request.app.routes),
    )
    headers = _GUARDS | {"cache-control": "no-store"}
    return Response(frame, media_type="text/html; charset=utf-8", headers=headers)


async def show_asset(request: Request) -> Response:
    """``GET /ui/assets/{name}``: a file of the page; its address changes with its content."""
    name = request.path_params["name"]
    data = _views(request).page.assets.get(name)
    if data is None:
        raise UnknownRoute("The page has no such file.")
    kind = _TYPES["." + name.rpartition(".")[2]]
    headers = _GUARDS | {"cache-control": "public, max-age=31536000, immutable"}
    return Response(data, media_type=kind, headers=headers)


async def watch(request: Request) -> ASGIApp:
    """``GET /ui/stream``: what the page shows, live, as far as the caller may see it."""
    gateway, broadcaster = gateway_of(request), _views(request).broadcaster
    _audience_of(request)
    if gateway.is_draining:
        raise Draining("The gateway is stopping.", retry_after_seconds=5)
    if broadcaster.watchers >= _MOST_WATCHERS:
        raise Overloaded(f"{_MOST_WATCHERS} pages already watch this gateway; close one.", retry_after_seconds=30)
    return LiveResponse(broadcaster, partial(_audience_of, request))


async def show_status(request: Request) -> JSONResponse:
    """``GET /admin/status``: what the page shows, as JSON, at most a second old."""
    as_admin(request)
    return JSONResponse(_views(request).observer.look().document())


def _audience_of(request: Request) -> Audience:
    """Who looks: without keys only this machine, as an operator; raises InvalidApiKey or NotAdmin."""
    gateway = gateway_of(request)
    if not gateway.settings.keys:
        as_admin(request)
        return Audience(is_operator=True)
    key = key_of(request)
    return Audience(is_operator=True) if key.admin else Audience(is_operator=False, models=key.visible_models)


def _views(request: Request) -> Views:
    app: Starlette = request.app
    views: Views = app.state.views
    return views


routes: list[BaseRoute] = [
    *(Route(path, show_page) for path in ("/", "/ui")),
    Route("/ui/assets/{name}", show_asset),
    Route("/ui/stream", watch),
    Route("/admin/status", show_status),
]
