"""A request of OpenAI's Responses API as a chat request, and what its answer repeats of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidValue, RequestError
from app.protocol.chat import ChatRequest, chat_request
from app.protocol.fields import MAX_INTEGER, boolean, integer, parse_object
from app.protocol.responses.items import conversation_of
from app.protocol.responses.names import put_in_their_words
from app.protocol.responses.refusals import refuse_unavailable
from app.protocol.responses.tools import chat_tools, functions, response_format, text_format, tool_choice

# What has the same name in a chat but another meaning, or another place here. Whatever else the chat knows (samplers,
# stops, seed) may be given too, as llama-server allows it.
_OWN = frozenset(
    {"input", "instructions", "text", "reasoning", "tools", "tool_choice", "n", "logprobs", "stream_options"}
)
_LOGPROBS = "message.output_text.logprobs"
_TRUNCATIONS = (None, "auto", "disabled")
_VERBOSITIES = (None, "low", "medium", "high")
_MAX_METADATA = 16
_MAX_SHORT = 512


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """``parameters`` is what the response object repeats; ``truncation`` is None when the client left it open.

    ``origins`` names for each message of the chat the field that it was made of.
    """

    chat: ChatRequest
    parameters: Mapping[str, Any]
    truncation: str | None
    origins: Sequence[str]


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """Check a body of ``/v1/responses``; raises RequestError or InvalidValue naming the field."""
    document = parse_object(body)
    refuse_unavailable(document)
    conversation = conversation_of(document)
    tools, text = functions(document), text_format(document)
    choice, offered = tool_choice(document, tools)
    chat = {key: value for key, value in document.items() if key not in _OWN} | {
        "messages": conversation.messages,
        "max_tokens": integer(document, "max_output_tokens", low=1, high=MAX_INTEGER),
        "tools": chat_tools(offered) or None,
        "tool_choice": choice,
        "response_format": response_format(text),
        "reasoning_effort": _reasoning(document).get("effort"),
        "logprobs": _wants_logprobs(document) or None,
    }
    try:
        request = chat_request(chat)
    except RequestError as error:
        put_in_their_words(error, conversation.origins)
        raise
    parameters = _parameters(document, request) | {
        "tools": tools,
        "tool_choice": document.get("tool_choice") or "auto",
        "text": _text(document, text),
    }
    return ResponsesRequest(request, parameters, document.get("truncation"), conversation.origins)


def _wants_logprobs(document: Mapping[str, Any]) -> bool:
    include = document.get("include")
    if include is not None and not (isinstance(include, list) and all(isinstance(name, str) for name in include)):
        raise InvalidValue("'include' must be a list of strings.", param="include")
    return _LOGPROBS in (include or ()) or bool(document.get("top_logprobs"))


def _reasoning(document: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = document.get("reasoning")
    if reasoning is None:
        return {}
    if not isinstance(reasoning, dict):
        raise InvalidValue("'reasoning' must be an object.", param="reasoning")
    for name in ("effort", "summary"):
        if not isinstance(reasoning.get(name), str | None):
            raise InvalidValue(f"'reasoning.{name}' must be a string.", param=f"reasoning.{name}")
    return reasoning


def _parameters(document: Mapping[str, Any], request: ChatRequest) -> dict[str, Any]:
    """What the chat request has checked is taken as it is; the rest is checked here."""
    reasoning, fields = _reasoning(document), request.fields
    boolean(document, "store")
    return {
        "background": False,
        "instructions": document.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": integer(document, "max_tool_calls", low=0, high=MAX_INTEGER),
        "metadata": _metadata(document),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "prompt_cache_key": _short(document, "prompt_cache_key"),
        # No summary is made: the reasoning itself is in the content of its items.
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": _short(document, "safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": fields.get("temperature"),
        "top_logprobs": fields.get("top_logprobs", 0),
        "top_p": fields.get("top_p"),
        "truncation": _one_of(document.get("truncation"), "truncation", _TRUNCATIONS) or "disabled",
        "user": _short(document, "user"),
    }


def _text(document: Mapping[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    given = document.get("text") or {}
    return {"format": text, "verbosity": _one_of(given.get("verbosity"), "text.verbosity", _VERBOSITIES) or "medium"}


def _one_of(value: Any, name: str, choices: tuple[str | None, ...]) -> str | None:
    for choice in choices:
        if value == choice:
            return choice
    raise InvalidValue(f"'{name}' must be one of {', '.join(filter(None, choices))}.", param=name)


def _short(document: Mapping[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is not None and not _is_short(value):
        raise InvalidValue(f"'{name}' must be a string of at most {_MAX_SHORT} characters.", param=name)
    return value


def _metadata(document: Mapping[str, Any]) -> dict[str, str]:
    metadata = document.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or len(metadata) > _MAX_METADATA or not all(map(_is_short, metadata.values())):
        raise InvalidValue(
            f"'metadata' must be an object of at most {_MAX_METADATA} strings of {_MAX_SHORT} characters.",
            param="metadata",
        )
    return metadata


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_SHORT
