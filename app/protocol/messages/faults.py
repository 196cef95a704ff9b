"""Failures in the words of Anthropic's API."""

from __future__ import annotations

from typing import Any

from app.errors import ContextLengthExceeded, GatewayError

# What is not here is the client's fault below 500 and ours above. The status stays: SDKs retry by it, and 503 is what
# load balancers know; Anthropic's own 529 is not.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to the Messages API."""
    path = path.removeprefix("/v1")
    return path == "/messages" or path.startswith("/messages/")


def error_document(error: GatewayError) -> dict[str, Any]:
    """The error object of Anthropic's API."""
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: GatewayError) -> str:
    """What went wrong; an overflow in the words by which Anthropic's clients recognise it and know what to cut."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    about = "at least " if error.at_least else ""
    prompt, limit, answer = error.prompt_tokens, error.context_tokens, error.max_tokens
    if answer is None or prompt >= limit:
        return f"prompt is too long: {about}{prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, decrease input length or "
        "`max_tokens` and try again (for an answer of that length the prompt is too long)"
    )
