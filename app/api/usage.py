"""What keys have used of what they may use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from app.api.admin import as_admin
from app.api.gateway import gateway_of, key_of


async def show_usage(request: Request) -> JSONResponse:
    """``GET /v1/usage``: the figures of the key that asks."""
    gateway, key = gateway_of(request), key_of(request)
    return JSONResponse(
        {"object": "usage", "key": key.name, "usage": await gateway.proxy.quota.usage(key.name, key.limits)}
    )


async def show_all_usage(request: Request) -> JSONResponse:
    """``GET /admin/usage``: the figures of every key."""
    gateway = as_admin(request)
    figures = {key.name: await gateway.proxy.quota.usage(key.name, key.limits) for key in gateway.authenticator}
    return JSONResponse({"object": "usage", "data": [{"key": name, "usage": usage} for name, usage in figures.items()]})


routes: list[BaseRoute] = [
    *(Route(path, show_usage) for path in ("/v1/usage", "/usage")),
    Route("/admin/usage", show_all_usage),
]
