"""Tools, their choice and the format of the text, as the chat API has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import InvalidValue, UnsupportedParameter

_FORMATS = ("text", "json_object", "json_schema")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def functions(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The field ``tools`` as the response repeats it; raises InvalidValue, UnsupportedParameter for other kinds."""
    tools = document.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidValue("'tools' must be a list.", param="tools")
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _function(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise InvalidValue(f"'{where}' must be an object with a 'type'.", param=where)
    if kind != "function":
        raise UnsupportedParameter(
            f"'{where}.type' is {kind[:64]!r}, a tool that OpenAI runs on its side and this gateway has not; "
            "offer the model a tool of type 'function' and run it yourself.",
            param=f"{where}.type",
        )
    name, parameters = tool.get("name"), tool.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidValue(f"'{where}.name' must be a string.", param=f"{where}.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidValue(f"'{where}.parameters' must be a JSON schema.", param=f"{where}.parameters")
    description, strict = tool.get("description"), tool.get("strict")
    if not isinstance(description, str | None) or not isinstance(strict, bool | None):
        raise InvalidValue(
            f"'{where}' needs a 'description' that is a string and a 'strict' that is a boolean.", param=where
        )
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same functions for a chat."""
    return [{"type": "function", "function": _chat_function(tool)} for tool in tools]


def _chat_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool[key] is not None}
    return {"parameters": _NO_PARAMETERS} | given


def tool_choice(document: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """The choice for a chat, and the functions among which the model may choose; raises InvalidValue."""
    choice = document.get("tool_choice")
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise _unknown_choice()
        return choice, tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {"type": "function", "function": {"name": _chosen(choice, tools)["name"]}}, tools
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    raise _unknown_choice()


def _unknown_choice() -> InvalidValue:
    return InvalidValue(
        "'tool_choice' must be none, auto, required, or an object of type 'function' or 'allowed_tools'.",
        param="tool_choice",
    )


def _chosen(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    name = choice.get("name") if isinstance(choice, dict) else None
    for tool in tools:
        if tool["name"] == name:
            return tool
    raise InvalidValue(
        f"'tool_choice' names the function {str(name)[:64]!r}, which is not among 'tools'.", param="tool_choice"
    )


def _allowed(choice: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list):
        raise InvalidValue(
            "'tool_choice' of type 'allowed_tools' needs 'mode' auto or required, and 'tools'.", param="tool_choice"
        )
    return mode, [_chosen(tool, tools) for tool in allowed]


def text_format(document: Mapping[str, Any]) -> dict[str, Any]:
    """The field ``text.format`` as the response repeats it; raises InvalidValue."""
    text = document.get("text")
    given = text.get("format") if isinstance(text, dict) else text
    if given is None:
        return {"type": "text"}
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise InvalidValue(f"'text.format.type' must be one of {', '.join(_FORMATS)}.", param="text.format")
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(given.get("schema"), dict) or not isinstance(given.get("name"), str):
        raise InvalidValue("'text.format' needs a 'name' and a 'schema' that is an object.", param="text.format")
    return {key: given.get(key) for key in ("type", "name", "description", "schema", "strict")}


def response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same format for a chat; None for free text."""
    if text["type"] == "text":
        return None
    if text["type"] == "json_object":
        return {"type": "json_object"}
    schema = {key: value for key, value in text.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
