"""Is the process alive, may it be sent traffic, and what do its numbers say. None of these asks an engine."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from app.api.gateway import gateway_of
from app.exposition import OPENMETRICS_TYPE, TEXT_TYPE, wants_openmetrics


async def live(request: Request) -> JSONResponse:
    """``GET /livez``, ``/healthz`` and ``/health``: the process answers."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> JSONResponse:
    """``GET /readyz``: 503 as soon as the gateway is stopping."""
    if gateway_of(request).is_draining:
        return JSONResponse({"status": "stopping"}, status_code=503)
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """``GET /metrics`` for Prometheus, in OpenMetrics if it asks for that."""
    openmetrics = wants_openmetrics(request.headers.get("accept", ""))
    return Response(
        gateway_of(request).metrics.expose(openmetrics=openmetrics),
        headers={"content-type": OPENMETRICS_TYPE if openmetrics else TEXT_TYPE, "vary": "accept"},
    )


routes: list[BaseRoute] = [
    *(Route(path, live) for path in ("/livez", "/healthz", "/health")),
    Route("/readyz", ready),
    Route("/metrics", metrics),
]
