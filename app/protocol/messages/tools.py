"""Tools and the choice among them → a chat's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import InvalidValue

_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The field ``tools``; raises InvalidValue, also for tools that Anthropic's own servers run."""
    tools = document.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidValue("'tools' must be a list.", param="tools")
    names: set[str] = set()
    converted = []
    for index, tool in enumerate(tools):
        function = _function(tool, f"tools[{index}]")
        if function["name"] in names:
            raise InvalidValue(f"'tools' has two tools named {function['name'][:64]!r}.", param="tools")
        names.add(function["name"])
        converted.append({"type": "function", "function": function})
    return converted


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidValue(f"'{where}' must be an object.", param=where)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidValue(
            f"'{where}' is of type {str(kind)[:64]!r}; this gateway runs no tools and knows none of Anthropic's: "
            "define it with a name, a description and an input_schema, and run it yourself.",
            param=where,
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidValue(f"'{where}.name' must be a string.", param=f"{where}.name")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidValue(f"'{where}.input_schema' must be an object.", param=f"{where}.input_schema")
    described = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    return {"name": tool["name"], **described, "parameters": tool["input_schema"]}


def chat_tool_choice(document: Mapping[str, Any]) -> dict[str, Any]:
    """``tool_choice`` and ``parallel_tool_calls`` of a chat, those that are given; raises InvalidValue."""
    choice = document.get("tool_choice")
    if choice is None:
        return {}
    if not isinstance(choice, dict) or choice.get("type") not in ("tool", *_CHOICES):
        raise InvalidValue("'tool_choice' must be an object of type auto, any, tool or none.", param="tool_choice")
    serial = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else {}
    if not document.get("tools") and choice["type"] in ("any", "tool"):
        raise InvalidValue("'tool_choice' asks for a tool, but there are no 'tools'.", param="tool_choice")
    return {"tool_choice": _chosen(choice), **serial}


def _chosen(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    if choice["type"] != "tool":
        return _CHOICES[choice["type"]]
    if not isinstance(choice.get("name"), str):
        raise InvalidValue("'tool_choice.name' must be a string.", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice["name"]}}
