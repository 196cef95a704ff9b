"""The models that may be asked, with the context that a request really has."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from app.api.error_answer import speaks_anthropic
from app.api.gateway import Gateway, gateway_of, key_of
from app.errors import ModelNotFound
from app.gguf import Kind, ModelFacts
from app.protocol.messages import model_info, model_page
from app.supervisor import ModelStatus

# llama.cpp's words for what a model can do.
_CAPABILITIES = {Kind.CHAT: "completion", Kind.EMBEDDING: "embedding", Kind.RERANK: "rerank"}


async def list_models(request: Request) -> JSONResponse:
    """``GET /v1/models``: what this key may use."""
    gateway, key = gateway_of(request), key_of(request)
    data = [_document(gateway, status) for status in gateway.supervisor if key.allows(status.model.id)]
    return JSONResponse(model_page(data) if speaks_anthropic(request.scope) else {"object": "list", "data": data})


async def retrieve_model(request: Request) -> JSONResponse:
    """``GET /v1/models/{id}``: one model by name or alias, slashes and all."""
    gateway, key = gateway_of(request), key_of(request)
    model = gateway.catalog.resolve(request.path_params["model_id"])
    if not key.allows(model.id):
        raise ModelNotFound(f"The model {model.id!r} does not exist for this key.", param="model")
    document = _document(gateway, gateway.supervisor.status(model))
    return JSONResponse(model_info(document) if speaks_anthropic(request.scope) else document)


def _document(gateway: Gateway, status: ModelStatus) -> dict[str, Any]:
    facts = status.facts
    return {
        "id": status.model.id,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "llama-gateway",
        "aliases": list(status.model.aliases),
        "max_model_len": status.context_tokens,
        "state": status.state.value,
        "kind": status.kind.value,
        "capabilities": [_CAPABILITIES[status.kind]],
        **({} if status.circuit is None else {"circuit": status.circuit}),
        "meta": {"n_ctx": status.context_tokens, **({} if facts is None else _meta(facts))},
    }


def _meta(facts: ModelFacts) -> dict[str, Any]:
    return {
        "n_ctx_train": facts.context_trained,
        "n_params": facts.parameters,
        "n_vocab": facts.vocabulary_size,
        "size": facts.file_bytes,
    }


routes: list[BaseRoute] = [
    *(Route(path, list_models) for path in ("/v1/models", "/models")),
    *(Route(path, retrieve_model) for path in ("/v1/models/{model_id:path}", "/models/{model_id:path}")),
]
