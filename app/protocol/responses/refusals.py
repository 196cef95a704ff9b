"""What OpenAI's Responses API has and this gateway has not, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import UnsupportedParameter

NOT_STORED = "responses are not stored here"

_INSTEAD: Mapping[str, str] = {
    "previous_response_id": f"{NOT_STORED}; send the earlier input and output items again in 'input'",
    "conversation": f"{NOT_STORED}; send the earlier input and output items again in 'input'",
    "background": f"{NOT_STORED}; send the request with 'stream': true and keep the connection",
    "prompt": "there are no stored prompts here; send the text in 'instructions' and 'input'",
    "context_management": "nothing is compacted here; send a shorter 'input', or 'truncation': \"auto\"",
    "moderation": "there is no moderation here; check the texts before and after",
}
# Names of the chat API: dropping one in silence would take away what its sender relies on.
_CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
    "function_call": "tool_choice",
}


def refuse_unavailable(document: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter for a field that asks for what there is not."""
    for name, instead in _INSTEAD.items():
        if document.get(name):
            raise UnsupportedParameter(f"'{name}' is not available: {instead}.", param=name)
    for name, theirs in _CHAT_NAMES.items():
        if document.get(name) is not None:
            raise UnsupportedParameter(
                f"'{name}' belongs to /v1/chat/completions; in a response it is '{theirs}'.", param=name
            )
