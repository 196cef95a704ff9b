"""What steers the answer: numbers, stops, tools, formats; each within the bounds that the engine does not check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from app.errors import InvalidValue
from app.protocol.fields import integer

_MAX_TOOLS = 128
_MAX_STOPS = 4

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


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Raises InvalidValue for a number of the wrong type or out of its range."""
    for name, (low, high) in _NUMBERS.items():
        value = fields.get(name)
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise InvalidValue(f"'{name}' must be a number from {low} to {high}.", param=name)
    for name, (lowest, highest) in _INTEGERS.items():
        integer(fields, name, low=lowest, high=highest)


def check_shapes(fields: Mapping[str, Any]) -> None:
    """Raises InvalidValue for a field of the wrong shape."""
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


def with_named_tool(fields: dict[str, Any]) -> dict[str, Any]:
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
