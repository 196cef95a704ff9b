"""An error as a response, in the shape of the API that was asked."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import Scope

from app.errors import GatewayError
from app.protocol.messages import error_document, is_messages_path

# Anthropic's clients send it with everything, and nobody else does.
_ANTHROPIC = b"anthropic-version"


def error_response(scope: Scope, error: GatewayError) -> JSONResponse:
    """Anthropic's error object where its API was asked, else OpenAI's."""
    if not is_messages_path(scope["path"]) and not speaks_anthropic(scope):
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
    return JSONResponse(error_document(error), status_code=error.status, headers=error.headers())


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the client is one of Anthropic's API."""
    return any(name == _ANTHROPIC for name, _ in scope["headers"])
