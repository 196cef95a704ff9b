"""Anthropic's Messages API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from app.api.body import read_json_body
from app.api.gateway import gateway_of, key_of
from app.api.preferences import preferences
from app.protocol.messages import ask_messages, count_document, parse_messages_request
from app.proxy import ExchangeResponse


async def create_message(request: Request) -> ExchangeResponse:
    """``POST /v1/messages``: checked here, done when the response is called."""
    gateway, key = gateway_of(request), key_of(request)
    body = await read_json_body(request, limit_bytes=int(gateway.settings.server.max_body))
    return gateway.proxy.generate(ask_messages(parse_messages_request(body)), key, preferences(request.headers))


async def count_tokens(request: Request) -> ExchangeResponse:
    """``POST /v1/messages/count_tokens``: the engine's own count, template and tools included."""
    gateway, key = gateway_of(request), key_of(request)
    body = await read_json_body(request, limit_bytes=int(gateway.settings.server.max_body))
    chat = parse_messages_request(body, counts_only=True).chat
    return gateway.proxy.count(chat, key, write=count_document, endpoint="messages_count_tokens")


routes: list[BaseRoute] = [
    *(Route(path, create_message, methods=["POST"]) for path in ("/v1/messages", "/messages")),
    *(Route(path, count_tokens, methods=["POST"]) for path in ("/v1/messages/count_tokens", "/messages/count_tokens")),
]
