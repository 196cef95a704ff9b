"""llama-server's own extras: tokens of a text and back, what a template makes and counts, text in its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from app.api.body import read_json_body
from app.api.gateway import gateway_of, key_of
from app.api.preferences import preferences
from app.gguf import Kind
from app.protocol import (
    Inspection,
    ask_native,
    chat_request,
    detokenize_request,
    infill_request,
    native_request,
    parse_object,
    template_request,
    tokenize_request,
)
from app.proxy import ExchangeResponse


async def tokenize(request: Request) -> ExchangeResponse:
    """``POST /tokenize``."""
    return await _inspect(request, tokenize_request, kind=None)


async def detokenize(request: Request) -> ExchangeResponse:
    """``POST /detokenize``."""
    return await _inspect(request, detokenize_request, kind=None)


async def apply_template(request: Request) -> ExchangeResponse:
    """``POST /apply-template``."""
    return await _inspect(request, template_request, kind=Kind.CHAT)


async def count_chat(request: Request) -> ExchangeResponse:
    """``POST /v1/chat/completions/input_tokens``: exact, and answered while all slots are busy."""
    gateway, key = gateway_of(request), key_of(request)
    chat = chat_request(await _document(request))
    return gateway.proxy.count(chat, key, write=_count, endpoint="input_tokens")


async def infill(request: Request) -> ExchangeResponse:
    """``POST /infill``: what goes between a prefix and a suffix; neither is ever cut."""
    gateway, key = gateway_of(request), key_of(request)
    return gateway.proxy.fill(infill_request(await _document(request)), key, preferences(request.headers))


async def complete(request: Request) -> ExchangeResponse:
    """``POST /completion``: llama-server's own request to go on with a text."""
    gateway, key = gateway_of(request), key_of(request)
    asked = native_request(await _document(request))
    return gateway.proxy.generate(ask_native(asked, "completion"), key, preferences(request.headers))


async def _inspect(
    request: Request, parse: Callable[[Mapping[str, Any]], Inspection], *, kind: Kind | None
) -> ExchangeResponse:
    gateway, key = gateway_of(request), key_of(request)
    return gateway.proxy.inspect(parse(await _document(request)), key, kind)


async def _document(request: Request) -> dict[str, Any]:
    """The body; where there is only one model nobody needs to name it, as with llama-server itself."""
    gateway = gateway_of(request)
    document = parse_object(await read_json_body(request, limit_bytes=int(gateway.settings.server.max_body)))
    if document.get("model") is None and len(gateway.catalog) == 1:
        document["model"] = next(iter(gateway.catalog)).id
    return document


def _count(tokens: int) -> bytes:
    return orjson.dumps({"input_tokens": tokens, "object": "response.input_tokens"})


_HANDLERS = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/chat/completions/input_tokens": count_chat,
    "/infill": infill,
}
routes: list[BaseRoute] = [
    *(Route(prefix + path, handler, methods=["POST"]) for path, handler in _HANDLERS.items() for prefix in ("", "/v1")),
    # /completions is OpenAI's.
    Route("/completion", complete, methods=["POST"]),
]
