"""Every failure leaves as the error object of the API that was asked, counted once."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.api.error_answer import error_response
from app.api.gateway import gateway_of
from app.errors import (
    GatewayError,
    MethodNotAllowed,
    RequestError,
    SetupError,
    Unavailable,
    UnknownRoute,
    UpstreamFailed,
    UpstreamTimeout,
)

_log = logging.getLogger(__name__)


def install_fault_handlers(app: FastAPI) -> None:
    """Answer GatewayError, unknown paths and methods, and the unexpected."""
    app.add_exception_handler(GatewayError, _on_gateway_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


async def _on_gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    if not isinstance(error, UpstreamFailed | UpstreamTimeout):
        gateway_of(request).metrics.rejected.labels(error.code or error.type).inc()
    if isinstance(error, SetupError):
        # Its message is for the operator and may name paths.
        _log.error("%s", error)
        error = Unavailable(f"The gateway cannot answer: {error.public}.", retry_after_seconds=30)
    return error_response(request.scope, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known: RequestError = UnknownRoute(f"There is no {request.method} {request.url.path[:200]} here.")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        known = MethodNotAllowed(f"{request.url.path[:200]} does not take {request.method}; use {allow}.", allow=allow)
    return await _on_gateway_error(request, known)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    gateway_of(request).metrics.client_disconnects.inc()
    # Nobody reads it; the status is what access logs use for a client that left.
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    _log.error("unexpected %s while answering %s %s", type(error).__name__, request.method, request.url.path)
    failure = GatewayError("The gateway failed unexpectedly; the operator finds the cause in its log.")
    return error_response(request.scope, failure)
