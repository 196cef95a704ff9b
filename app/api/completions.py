"""Text completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from app.api.body import read_json_body
from app.api.gateway import gateway_of, key_of
from app.api.preferences import preferences
from app.protocol import ask_completion, parse_completion_request
from app.proxy import ExchangeResponse


async def create_completion(request: Request) -> ExchangeResponse:
    """``POST /v1/completions``: checked here, done when the response is called."""
    gateway = gateway_of(request)
    key = key_of(request)
    body = await read_json_body(request, limit_bytes=int(gateway.settings.server.max_body))
    return gateway.proxy.generate(ask_completion(parse_completion_request(body)), key, preferences(request.headers))


routes: list[BaseRoute] = [
    Route(path, create_completion, methods=["POST"]) for path in ("/v1/completions", "/completions")
]
