"""The same field under the name that OpenAI's Responses API has for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from app.errors import GatewayError

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def put_in_their_words(error: GatewayError, origins: Sequence[str] = ()) -> None:
    """Make an error about a chat request one about the response asked for.

    ``origins`` names for each message of the chat the field that it was made of.
    """
    ours, theirs = error.param, _their_name(error.param, origins)
    if ours is None:
        for name in _NAMES:
            error.message = error.message.replace(f"'{name}'", f"'{_NAMES[name]}'")
    elif theirs is not None:
        error.param = theirs
        error.message = error.message.replace(f"'{ours}", f"'{theirs}")
    error.args = (error.message,)


def _their_name(ours: str | None, origins: Sequence[str]) -> str | None:
    if ours is None:
        return None
    message = _MESSAGE.fullmatch(ours)
    if message is None:
        return _NAMES.get(ours)
    number = int(message[1])
    # The address of a picture is an object there and a string here.
    return origins[number] + message[2].replace(".image_url.url", ".image_url") if number < len(origins) else None
