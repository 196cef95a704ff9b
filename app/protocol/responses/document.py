"""The response object: its head, its output, how it ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from app.errors import GatewayError
from app.protocol.responses.output import COMPLETED, INCOMPLETE, Output
from app.protocol.usage import Usage

FAILED = "failed"
_CUT_SHORT = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseDocument:
    """One response, made out anew for each of its states."""

    def __init__(self, parameters: Mapping[str, Any], model: str) -> None:
        self.identity = secrets.token_hex(16)
        self.model = model
        self._parameters = parameters
        self._created_at = int(time.time())

    def of(self, status: str, **more: Any) -> dict[str, Any]:
        """The response in this state."""
        head = {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
        }
        return {**head, **self._parameters, "usage": None, **more}

    def ended(self, output: Output, usage: Usage) -> dict[str, Any]:
        """The response when the engine has finished, completed or cut short."""
        reason = _CUT_SHORT.get(output.finish_reason or "")
        counted = _usage(usage, reasoning_tokens=output.reasoning_pieces)
        if reason is None:
            end = {"completed_at": int(time.time()), "output": output.documents(), "usage": counted}
            return self.of(COMPLETED, **end)
        details = {"reason": reason}
        return self.of(INCOMPLETE, incomplete_details=details, output=output.documents(), usage=counted)

    def failed(self, output: Output, error: GatewayError) -> dict[str, Any]:
        """The response that broke off; ``code`` is from the API's short list, the event after it has ours."""
        return self.of(FAILED, error={"code": "server_error", "message": error.message}, output=output.documents())


def _usage(usage: Usage, *, reasoning_tokens: int) -> dict[str, Any]:
    """Engines do not split what they generated; thoughts come about one token to an event, or fewer."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": min(reasoning_tokens, usage.completion_tokens)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
