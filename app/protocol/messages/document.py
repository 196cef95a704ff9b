"""The parts of an answer that streams and documents share: its head, its end, its usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import UpstreamFailed
from app.protocol.delta import Delta
from app.protocol.usage import Usage

# Clients drop thoughts that nobody signed from the conversation. Ours are signed with a name, which proves nothing.
SIGNATURE = "llama-gateway"
# Whether an answer that ended by itself calls tools is seen by its calls.
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended; ``stop_sequence`` is one of the client's own."""

    stop_reason: str
    stop_sequence: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the answer ends in the middle of what the model wanted to say."""
        return self.stop_reason == "max_tokens"

    @classmethod
    def of(cls, delta: Delta, stops: frozenset[str], *, called: bool) -> Ending:
        """The ending that the last chunk tells; templates have stop words too, which are no stop sequences."""
        reason = _STOP_REASONS.get(delta.finish_reason or "")
        if reason is not None:
            return cls(reason)
        if called:
            return cls("tool_use")
        if delta.stopping_word in stops:
            return cls("stop_sequence", delta.stopping_word)
        return cls("end_turn")


def message_document(*, identity: str, model: str) -> dict[str, Any]:
    """A message without content and without an end."""
    return {
        "id": "msg_" + identity.removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def usage_document(usage: Usage) -> dict[str, Any]:
    """Anthropic's ``usage``: what came from the cache is not among ``input_tokens``."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def tool_use_id(identity: str, *, message_id: str, place: int) -> str:
    """The id of a call: the engine's own where it is one that clients take."""
    plain = identity.replace("-", "").replace("_", "")
    if plain.isascii() and plain.isalnum():
        return identity
    return f"toolu_{message_id.removeprefix('chatcmpl-')}_{place}"


def parse_input(arguments: str) -> dict[str, Any]:
    """The input of a call; raises UpstreamFailed for arguments that are no JSON object."""
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise UpstreamFailed("The model called a tool with arguments that are not a JSON object.", streamed=True)
    return value


def is_whole(arguments: str) -> bool:
    """Whether these arguments can have no more behind them."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return False
    return True
