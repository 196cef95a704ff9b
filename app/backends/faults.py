"""What llama-server says went wrong → the error that our client gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from app.errors import ContextLengthExceeded, GatewayError, ModelLoading, RequestError, Unavailable, UpstreamFailed

# llama-server answers these faults of the request with 500, which SDKs would send again.
_CLIENT_FAULTS = (
    "Failed to parse",
    "Failed to load image",
    "Failed to initialize samplers",
    "Jinja Exception",
    "Unable to generate parser",
    "failed to parse grammar",
    "image input is not supported",
    "audio input is not supported",
    "is too large to process",
    "tools param requires",
)
_TOO_LARGE = re.compile(r"input \((\d+) tokens\) is too large to process.*batch size: (\d+)")
_FIELD = re.compile(r"Field '([\w.\[\]]+)'")
# In quotes up to the closing one, else up to white space or a bracket; a drive letter or a slash begins it.
_PATH = re.compile(
    r"""(?<=")(?:/|[A-Za-z]:[\\/])[^"]*|(?<=')(?:/|[A-Za-z]:[\\/])[^']*"""
    r"""|(?<![\w/])(?:/|[A-Za-z]:[\\/])[^\s'"()<>,;]*"""
)


def read_object(content: bytes) -> dict[str, Any]:
    """The JSON object that an engine answered; raises UpstreamFailed."""
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UpstreamFailed("The engine answered with something that is not JSON.") from error
    if not isinstance(document, dict):
        raise UpstreamFailed("The engine answered with something that is not an object.")
    return document


def engine_fault(status: int, body: bytes) -> GatewayError:
    """The error for a response of the engine with this status and body."""
    try:
        error = orjson.loads(body)["error"]
        fields: Mapping[str, Any] = error if isinstance(error, dict) else {"message": str(error)}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        fields = {}
    return fault_of(status, fields)


def fault_of(status: int, fields: Mapping[str, Any], *, streamed: bool = False) -> GatewayError:
    """The error for an ``error`` object of the engine, from a response or (``streamed``) from within a stream."""
    message = _PATH.sub("[path]", str(fields.get("message") or "the engine gave no reason"))[:500]
    if fields.get("type") == "exceed_context_size_error":
        return ContextLengthExceeded(
            prompt_tokens=int(fields.get("n_prompt_tokens") or 0),
            max_tokens=None,
            context_tokens=int(fields.get("n_ctx") or 0),
        )
    if (sizes := _TOO_LARGE.search(message)) is not None:
        # What is computed at once has to fit one batch.
        return ContextLengthExceeded(
            prompt_tokens=int(sizes[1]),
            max_tokens=None,
            context_tokens=int(sizes[2]),
            field="input",
            is_answered=False,
        )
    if "Context size has been exceeded" in message:
        return Unavailable("The engine ran out of context cells; try again.", retry_after_seconds=1)
    if status == 503:
        return ModelLoading("The model is still loading; try again.", retry_after_seconds=5)
    if status in (400, 501) or any(fault in message for fault in _CLIENT_FAULTS):
        field = _FIELD.search(message)
        return RequestError(f"The engine refused the request: {message}", param=field.group(1) if field else None)
    return UpstreamFailed(f"The engine could not answer ({status}): {message}", streamed=streamed)
