"""A chat request: the fields that we read, checked; the rest of the known names, untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import InvalidValue, RequestError

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
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})
# With one of these the rendered prompt holds more than the messages.
_RENDERED_FIELDS = frozenset({"tools", "tool_choice", "response_format", "chat_template_kwargs", "reasoning_effort"})
_MAX_MESSAGES = 4096
# The engine looks keys up one by one, quadratic in their number, and recurses into what is nested.
_MAX_KEYS = 1024
_MAX_DEPTH = 64
_MAX_TOOLS = 128
_MAX_STOPS = 4


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One parsed request; ``max_tokens`` is None when the client set no limit."""

    model: str
    messages: list[dict[str, Any]]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    choices: int
    fields: Mapping[str, Any]

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

    def counting_body(self) -> bytes:
        """What the engine needs to render and count the prompt."""
        rendered = {key: self.fields[key] for key in _RENDERED_FIELDS if key in self.fields}
        return orjson.dumps({"messages": self.messages, **rendered})

    def engine_body(self, *, max_tokens: int, slot: int | None = None) -> bytes:
        """What the engine gets: always a stream with usage and progress, always a limit.

        The engine cancels a non-streaming request late after its client left, a stream at its next write.
        """
        return orjson.dumps(
            {
                **self.fields,
                **({} if slot is None else {"id_slot": slot}),
                "messages": self.messages,
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_progress": True,
            }
        )


def parse_chat_request(body: bytes) -> ChatRequest:
    """Check a body of ``/v1/chat/completions``; raises RequestError or InvalidValue naming the field."""
    document = _parse_object(body)
    _check_size({key: value for key, value in document.items() if key in _FORWARDED or key == "messages"})
    _check_replaced(document)
    fields = {key: document[key] for key in _FORWARDED if document.get(key) is not None}
    _check_numbers(fields)
    _check_shapes(fields)
    stream = _boolean(document, "stream")
    return ChatRequest(
        model=_model(document),
        messages=_messages(document),
        stream=stream,
        include_usage=stream and _include_usage(document),
        max_tokens=_max_tokens(document),
        choices=fields.get("n", 1),
        fields=_with_named_tool(fields),
    )


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON ({str(error)[:200]}); send one JSON object in UTF-8.") from None
    if not isinstance(document, dict):
        raise RequestError("The body must be a JSON object.")
    return document


def _check_size(document: Mapping[str, Any]) -> None:
    """Refuse what would keep the engine busy before it has read it; what is dropped does not matter."""
    level: list[Any] = list(document.items())
    # The document itself is the first.
    for _ in range(_MAX_DEPTH - 1):
        deeper = [(name, value) for name, value in level if isinstance(value, dict | list)]
        level = []
        for name, value in deeper:
            if isinstance(value, dict) and len(value) > _MAX_KEYS:
                raise InvalidValue(f"'{name}' holds an object of more than {_MAX_KEYS} keys.", param=name)
            level += [(name, inner) for inner in (value.values() if isinstance(value, dict) else value)]
    for name, value in level:
        if isinstance(value, dict | list):
            raise InvalidValue(f"'{name}' is nested more than {_MAX_DEPTH} deep.", param=name)


def _check_replaced(document: Mapping[str, Any]) -> None:
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if document.get(old) is not None:
            raise InvalidValue(f"'{old}' is not supported; use '{new}'.", param=old)


def _model(document: Mapping[str, Any]) -> str:
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidValue(
            "Name a model: the field 'model' must be a string; GET /v1/models lists them.", param="model"
        )
    return model


def _boolean(document: Mapping[str, Any], name: str) -> bool:
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidValue(f"'{name}' must be true or false.", param=name)
    return bool(value)


def _include_usage(document: Mapping[str, Any]) -> bool:
    options = document.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidValue("'stream_options' must be an object.", param="stream_options")
    return _boolean(options, "include_usage")


def _integer(document: Mapping[str, Any], name: str, *, low: int, high: int) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    # A bool is an int in Python, and the engine would wrap an integer over 32 bits.
    if type(value) is not int or not low <= value <= high:
        raise InvalidValue(f"'{name}' must be an integer from {low} to {high}.", param=name)
    return value


def _max_tokens(document: Mapping[str, Any]) -> int | None:
    """The newer name wins when both are given, as in OpenAI's API."""
    high = (1 << 31) - 1
    old = _integer(document, "max_tokens", low=1, high=high)
    new = _integer(document, "max_completion_tokens", low=1, high=high)
    return new if new is not None else old


def _messages(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidValue("'messages' must be a list of at least one message.", param="messages")
    if len(messages) > _MAX_MESSAGES:
        raise InvalidValue(f"'messages' has more than {_MAX_MESSAGES} entries.", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidValue(f"'{where}' must be an object.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidValue(f"'{where}.role' must be one of {', '.join(sorted(_ROLES))}.", param=f"{where}.role")
    _check_content(message, where)
    return message | {"role": "system"} if role == "developer" else message


def _check_content(message: Mapping[str, Any], where: str) -> None:
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            raise InvalidValue(f"'{where}.content' is missing.", param=f"{where}.content")
    elif isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{where}.content[{index}]")
    elif not isinstance(content, str):
        raise InvalidValue(f"'{where}.content' must be a string or a list of parts.", param=f"{where}.content")


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidValue(f"'{where}' must be a part of type 'text': this model reads text only.", param=where)


_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repeat_penalty": (0, 10),
}
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "n": (1, 128),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "top_logprobs": (0, 20),
    "top_k": (0, 1 << 20),
    "repeat_last_n": (-1, 1 << 20),
}


def _check_numbers(fields: Mapping[str, Any]) -> None:
    for name, (low, high) in _NUMBERS.items():
        value = fields.get(name)
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise InvalidValue(f"'{name}' must be a number from {low} to {high}.", param=name)
    for name, (lowest, highest) in _INTEGERS.items():
        _integer(fields, name, low=lowest, high=highest)


def _check_shapes(fields: Mapping[str, Any]) -> None:
    for name, (is_valid, says) in _SHAPES.items():
        if name in fields and not is_valid(fields[name]):
            raise InvalidValue(f"'{name}' must be {says}.", param=name)
    if "top_logprobs" in fields and not fields.get("logprobs"):
        raise InvalidValue("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and len(value) <= _MAX_STOPS and all(isinstance(item, str) for item in value)
    )


def _is_tool_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_TOOLS
        and all(
            isinstance(tool, dict)
            and isinstance(tool.get("function"), dict)
            and isinstance(tool["function"].get("name"), str)
            for tool in value
        )
    )


def _is_tool_choice(value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("function"), dict) and isinstance(value["function"].get("name"), str)
    return value in ("none", "auto", "required")


_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "logprobs": (lambda value: isinstance(value, bool), "true or false"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "parallel_tool_calls": (lambda value: isinstance(value, bool), "true or false"),
    "logit_bias": (lambda value: isinstance(value, dict), "an object"),
    "response_format": (lambda value: isinstance(value, dict), "an object"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "reasoning_effort": (lambda value: isinstance(value, str), "a string"),
    "stop": (_is_stop, f"a string or a list of at most {_MAX_STOPS} strings"),
    "tools": (_is_tool_list, f"a list of at most {_MAX_TOOLS} functions with a name"),
    "tool_choice": (_is_tool_choice, "none, auto, required, or an object that names a function"),
}


def _with_named_tool(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn a named tool choice into that one tool and ``required``: the engine silently ignores the object form."""
    choice = fields.get("tool_choice")
    if not isinstance(choice, dict):
        return fields
    name = choice["function"]["name"]
    tools = [tool for tool in fields.get("tools", []) if tool["function"]["name"] == name]
    if not tools:
        raise InvalidValue(
            f"'tool_choice' names the function {name[:64]!r}, which is not among 'tools'.", param="tool_choice"
        )
    return fields | {"tools": tools, "tool_choice": "required"}
