"""A body of Anthropic's Messages API → a chat request, checked in Anthropic's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.errors import InvalidValue
from app.protocol.chat import ChatRequest, chat_request
from app.protocol.fields import MAX_INTEGER, boolean, integer, model_name, parse_object
from app.protocol.messages.content import chat_messages
from app.protocol.messages.thinking import Thinking, read_thinking
from app.protocol.messages.tools import chat_tool_choice, chat_tools

_MAX_STOPS = 64
# With the word that ended an answer the engine sends the whole prompt back, in one event.
_VERBOSE_BELOW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """``chat`` is what is asked of the engine; ``stops`` are the client's own stop sequences."""

    chat: ChatRequest
    stops: frozenset[str]
    shows_thinking: bool


def parse_messages_request(body: bytes, *, counts_only: bool = False) -> MessagesRequest:
    """Check a body of ``/v1/messages``; raises RequestError or InvalidValue naming the field.

    Fields that are not read are ignored: metadata, cache_control, service_tier, container, betas, …

    With ``counts_only`` it is one of ``/v1/messages/count_tokens``, which has no limit.
    """
    document = parse_object(body)
    model = model_name(document)
    _check_no_servers(document)
    thinking = read_thinking(document)
    stops = _stops(document)
    chat = chat_request(
        {
            "model": model,
            "messages": chat_messages(document),
            "stream": boolean(document, "stream"),
            "max_tokens": None if counts_only else _max_tokens(document, thinking),
            **{name: document[name] for name in ("temperature", "top_p", "top_k") if name in document},
            **({"tools": tools} if (tools := chat_tools(document)) else {}),
            **chat_tool_choice(document),
            **thinking.chat_fields(),
            **_response_format(document),
        }
    )
    fields = {**chat.fields, **thinking.engine_fields(), **_stop_fields(stops, len(body))}
    return MessagesRequest(replace(chat, fields=fields), frozenset(stops), thinking.is_shown)


def _check_no_servers(document: Mapping[str, Any]) -> None:
    if document.get("mcp_servers"):
        raise InvalidValue(
            "'mcp_servers' are not supported: this gateway runs no tools; connect to them yourself.",
            param="mcp_servers",
        )


def _max_tokens(document: Mapping[str, Any], thinking: Thinking) -> int:
    limit = integer(document, "max_tokens", low=1, high=MAX_INTEGER)
    if limit is None:
        raise InvalidValue("'max_tokens' is missing: say how long the answer may be.", param="max_tokens")
    if thinking.budget_tokens is not None and limit <= thinking.budget_tokens:
        raise InvalidValue("'max_tokens' must be greater than 'thinking.budget_tokens'.", param="max_tokens")
    return limit


def _stops(document: Mapping[str, Any]) -> list[str]:
    stops = document.get("stop_sequences") or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop.strip() for stop in stops):
        raise InvalidValue(
            "'stop_sequences' must be a list of strings that are more than white space.", param="stop_sequences"
        )
    if len(stops) > _MAX_STOPS:
        raise InvalidValue(f"'stop_sequences' has more than {_MAX_STOPS} entries.", param="stop_sequences")
    return stops


def _stop_fields(stops: list[str], body_bytes: int) -> dict[str, Any]:
    """Only a verbose engine says which word ended the answer."""
    if not stops:
        return {}
    return {"stop": stops} | ({"verbose": True} if body_bytes < _VERBOSE_BELOW_BYTES else {})


def _response_format(document: Mapping[str, Any]) -> dict[str, Any]:
    """``output_config.format``, by its older name ``output_format``."""
    config = document.get("output_config") or {}
    shape = (config.get("format") if isinstance(config, dict) else None) or document.get("output_format")
    if shape is None:
        return {}
    if not isinstance(shape, dict) or shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
        raise InvalidValue(
            "'output_config.format' must be an object of type json_schema with a schema.", param="output_config.format"
        )
    schema = {"name": "output", "schema": shape["schema"], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
