"""Embeddings and ranking: numbers for texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from app.api.body import read_json_body
from app.api.gateway import gateway_of, key_of
from app.api.preferences import preferences
from app.gguf import Kind
from app.protocol import parse_embedding_request, parse_rank_request
from app.proxy import ExchangeResponse


async def create_embeddings(request: Request) -> ExchangeResponse:
    """``POST /v1/embeddings``."""
    gateway, key = gateway_of(request), key_of(request)
    question = parse_embedding_request(await _body(request))
    return gateway.proxy.ask(question, key, Kind.EMBEDDING, preferences(request.headers))


async def rerank(request: Request) -> ExchangeResponse:
    """``POST /v1/rerank``, also ``/v1/reranking``."""
    gateway, key = gateway_of(request), key_of(request)
    question = parse_rank_request(await _body(request))
    return gateway.proxy.ask(question, key, Kind.RERANK, preferences(request.headers))


async def _body(request: Request) -> bytes:
    return await read_json_body(request, limit_bytes=int(gateway_of(request).settings.server.max_body))


routes: list[BaseRoute] = [
    *(Route(path, create_embeddings, methods=["POST"]) for path in ("/v1/embeddings", "/embeddings")),
    *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")),
]
