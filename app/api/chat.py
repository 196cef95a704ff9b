"""Chat completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from app.api.body import read_json_body
from app.api.gateway import gateway_of, key_of
from app.api.preferences import preferences
from app.protocol import ask_chat, parse_chat_request
from app.proxy import ExchangeResponse


async def create_chat_completion(request: Request) -> ExchangeResponse:
    """``POST /v1/chat/completions``: checked here, done when the response is called."""
    gateway = gateway_of(request)
    key = key_of(request)
    body = await read_json_body(request, limit_bytes=int(gateway.settings.server.max_body))
    return gateway.proxy.generate(ask_chat(parse_chat_request(body)), key, preferences(request.headers))


# Plain Starlette routes: FastAPI's own would build a dependency solver around every request of the data path.
routes: list[BaseRoute] = [
    Route(path, create_chat_completion, methods=["POST"]) for path in ("/v1/chat/completions", "/chat/completions")
]
