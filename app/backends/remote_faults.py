"""What a server elsewhere says went wrong → the error that our client gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.backends.faults import engine_fault
from app.errors import (
    AnswerRejected,
    ContextLengthExceeded,
    ContextRefused,
    GatewayError,
    ModelLoading,
    Overloaded,
    RequestError,
    Unavailable,
    UpstreamFailed,
    UpstreamTimeout,
)

_LONGEST_RETRY_SECONDS = 60.0
_REFUSED = "The remote server refused the request: "


def remote_fault(status: int, headers: Mapping[str, str], body: bytes) -> GatewayError:
    """The error for a response with this status; what it says of our key or its paths goes to nobody."""
    if status in (401, 403):
        return UpstreamFailed("The remote server does not accept the gateway's key; its operator has to mend that.")
    if status in (404, 405):
        return UpstreamFailed("The remote server does not have this model or this route any more.")
    if status == 429:
        return Overloaded("The remote server has too much to do; try again.", retry_after_seconds=_retry(headers))
    if status == 503:
        error = ModelLoading if _fields(body).get("code") == "model_loading" else Unavailable
        return error("The remote server cannot answer now; try again.", retry_after_seconds=_retry(headers))
    if status in (408, 504):
        return UpstreamTimeout("The remote server needed too long; try again.")
    if status in (400, 413, 422):
        return _fault_of_the_request(_fields(body))
    fault = engine_fault(status, body)
    return fault if isinstance(fault, RequestError) else UpstreamFailed(f"The remote server failed ({status}).")


def is_its_fault(error: BaseException) -> bool:
    """Whether an error says that the server does not work, and not that request, client or model are at fault."""
    return isinstance(error, GatewayError) and error.status in (500, 502, 504) and not isinstance(error, AnswerRejected)


def _fault_of_the_request(fields: Mapping[str, Any]) -> GatewayError:
    prompt, context = fields.get("n_prompt_tokens"), fields.get("n_ctx")
    if isinstance(prompt, int) and isinstance(context, int):
        return ContextLengthExceeded(prompt_tokens=prompt, max_tokens=None, context_tokens=context)
    fault = engine_fault(400, orjson.dumps({"error": {"message": fields.get("message")}}))
    message = fault.message.rpartition("The engine refused the request: ")[2]
    if fields.get("code") == "context_length_exceeded":
        return ContextRefused(_REFUSED + message, param="messages")
    param = fields.get("param")
    return RequestError(_REFUSED + message, param=param if isinstance(param, str) else None)


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    error = document.get("error", document) if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {"message": str(error)}


def _retry(headers: Mapping[str, str]) -> float:
    try:
        return min(_LONGEST_RETRY_SECONDS, max(1.0, float(headers.get("retry-after", ""))))
    except ValueError:
        # None, or a date.
        return 5.0
