"""A chat request: the fields that we read, checked; the rest of the known names, untouched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import orjson

from app.errors import InvalidValue
from app.protocol.abilities import Abilities, Headers, require_media, with_one_system_message, with_tools_looked_at
from app.protocol.conversation import conversation, media_of
from app.protocol.expectation import NOTHING, Expectation, expectation
from app.protocol.fields import MAX_INTEGER, boolean, check_size, include_usage, integer, model_name, parse_object
from app.protocol.steering import check_numbers, check_shapes, with_named_tool
from app.protocol.streamed import streamed_body

# What goes down to the engine besides messages, stream and the token limit. Every other name is dropped: llama-server
# reads dozens of private ones (n_predict, id_slot, cache_prompt, grammar, …) by which a client could get around its
# limits or reach another client's slot, and it ignores the rest of OpenAI's (user, metadata, store, …) anyway.
_FORWARDED = frozenset(
    {
        "chat_template_kwargs",
        "dry_allowed_length",
        "dry_base",
        "dry_multiplier",
        "dry_penalty_last_n",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "min_p",
        "mirostat",
        "mirostat_eta",
        "mirostat_tau",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "repeat_last_n",
        "repeat_penalty",
        "response_format",
        "seed",
        "stop",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
    }
)
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})
# With one of these the rendered prompt holds more than the messages.
_RENDERED_FIELDS = frozenset({"tools", "tool_choice", "response_format", "chat_template_kwargs", "reasoning_effort"})


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One parsed request; ``max_tokens`` is None when the client set no limit."""

    route: ClassVar[str] = "/v1/chat/completions"

    model: str
    messages: list[dict[str, Any]]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    choices: int
    fields: Mapping[str, Any]
    expectation: Expectation = NOTHING
    # Kinds of parts beside text; what they come to in tokens only the engine can say.
    media: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether the rendered prompt consists of nothing but the contents and the template's own text."""
        if not _RENDERED_FIELDS.isdisjoint(self.fields):
            return False
        return all(
            message["role"] in _PLAIN_ROLES and isinstance(message.get("content"), str) and len(message) == 2
            for message in self.messages
        )

    @property
    def content_bytes(self) -> int:
        """UTF-8 bytes of all contents of a plain request."""
        return sum(len(message["content"].encode()) for message in self.messages)

    def adapted(self, abilities: Abilities) -> tuple[ChatRequest, Headers]:
        """The request as this model can take it, and what to tell the client about it; raises UnsupportedParameter."""
        require_media(self.media, abilities)
        if abilities.tools and abilities.late_system:
            return self, []
        fields, notes = with_tools_looked_at(self.fields, abilities)
        messages = self.messages if abilities.late_system else with_one_system_message(self.messages)
        return replace(self, fields=fields, messages=messages), notes

    def slots_at_once(self, capacity: int) -> int:
        """Slots that it needs at the same time, whatever the ``capacity``: the choices share the prompt."""
        return self.choices

    def counting_body(self) -> bytes:
        """What the engine needs to render and count the prompt."""
        rendered = {key: self.fields[key] for key in _RENDERED_FIELDS if key in self.fields}
        return orjson.dumps({"messages": self.messages, **rendered})

    def engine_body(self, *, max_tokens: int, slot: int | None = None) -> bytes:
        """What the engine gets."""
        return streamed_body(self.fields, max_tokens=max_tokens, slot=slot, messages=self.messages)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Check a body of ``/v1/chat/completions``; raises RequestError or InvalidValue naming the field."""
    return chat_request(parse_object(body))


def chat_request(document: Mapping[str, Any]) -> ChatRequest:
    """The same for a body that is read already, or that was made of another API's; raises InvalidValue."""
    check_size({key: value for key, value in document.items() if key in _FORWARDED or key == "messages"})
    _check_replaced(document)
    fields = {key: document[key] for key in _FORWARDED if document.get(key) is not None}
    check_numbers(fields)
    check_shapes(fields)
    fields = with_named_tool(fields)
    stream = boolean(document, "stream")
    messages = conversation(document)
    return ChatRequest(
        model=model_name(document),
        messages=messages,
        media=media_of(messages),
        stream=stream,
        include_usage=stream and include_usage(document),
        max_tokens=_max_tokens(document),
        choices=fields.get("n", 1),
        fields=fields,
        expectation=expectation(fields),
    )


def _check_replaced(document: Mapping[str, Any]) -> None:
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if document.get(old) is not None:
            raise InvalidValue(f"'{old}' is not supported; use '{new}'.", param=old)


def _max_tokens(document: Mapping[str, Any]) -> int | None:
    """The newer name wins when both are given, as in OpenAI's API."""
    old = integer(document, "max_tokens", low=1, high=MAX_INTEGER)
    new = integer(document, "max_completion_tokens", low=1, high=MAX_INTEGER)
    return new if new is not None else old
