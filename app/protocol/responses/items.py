"""The items of an input as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.errors import InvalidValue, UnsupportedParameter
from app.protocol.responses.parts import chat_content, joined_text
from app.protocol.responses.refusals import NOT_STORED

_ROLES = frozenset({"user", "assistant", "system", "developer"})
_MAX_ITEMS = 4096


@dataclass(slots=True)
class Conversation:
    """``origins`` names for each message the field that it was made of."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def append(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        """Add a message."""
        self.messages.append(message)
        self.origins.append(where)
        return message

    def assistant(self, where: str) -> dict[str, Any]:
        """The assistant's message that the next item of its turn belongs to."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self.append({"role": "assistant", "content": None}, where)


def conversation_of(document: Mapping[str, Any]) -> Conversation:
    """``instructions`` and ``input``; raises InvalidValue or UnsupportedParameter naming the item."""
    conversation = Conversation()
    instructions, given = document.get("instructions"), document.get("input")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise InvalidValue("'instructions' must be a string.", param="instructions")
        conversation.append({"role": "system", "content": instructions}, "instructions")
    if isinstance(given, str):
        conversation.append({"role": "user", "content": given}, "input")
    elif not isinstance(given, list) or not given:
        raise InvalidValue("'input' must be a string or a list of at least one item.", param="input")
    elif len(given) > _MAX_ITEMS:
        raise InvalidValue(f"'input' has more than {_MAX_ITEMS} items.", param="input")
    else:
        _Items(conversation).read(given)
    return conversation


class _Items:
    """An assistant's turn is one message in a chat and several items here: reasoning, text, calls."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._calls: set[str] = set()

    def read(self, items: list[Any]) -> None:
        for index, item in enumerate(items):
            self._read(item, f"input[{index}]")

    def _read(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise InvalidValue(f"'{where}' must be an object.", param=where)
        kind = item.get("type")
        if kind == "message" or (kind is None and "role" in item):
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._call_output(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in ("item_reference", None):
            raise UnsupportedParameter(f"'{where}' only refers to an item: {NOT_STORED}; send it whole.", param=where)
        else:
            raise UnsupportedParameter(
                f"'{where}.type' is {str(kind)[:64]!r}, of a tool that is not available here; "
                "send messages, reasoning, function calls and their outputs.",
                param=f"{where}.type",
            )

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidValue(f"'{where}.role' must be one of {', '.join(sorted(_ROLES))}.", param=f"{where}.role")
        content = chat_content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._conversation.append({"role": role, "content": content}, where)
            return
        turn = self._conversation.assistant(where)
        if turn["content"] is not None:
            turn = self._conversation.append({"role": "assistant", "content": None}, where)
        turn["content"] = content

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        call_id, name, arguments = (_string(item, key, where) for key in ("call_id", "name", "arguments"))
        self._calls.add(call_id)
        calls = self._conversation.assistant(where).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _call_output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        if call_id not in self._calls:
            raise InvalidValue(
                f"'{where}' answers the call {call_id[:64]!r}, but no function_call item before it has that call_id.",
                param=f"{where}.call_id",
            )
        content = chat_content(item.get("output"), f"{where}.output")
        self._conversation.append({"role": "tool", "tool_call_id": call_id, "content": content}, where)

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """What another server has encrypted can be read by that one only: of no use to any model here."""
        text = joined_text(item.get("content"), f"{where}.content")
        text = text or joined_text(item.get("summary"), f"{where}.summary")
        if text:
            self._conversation.append({"role": "assistant", "content": None, "reasoning_content": text}, where)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"'{where}.{name}' must be a string.", param=f"{where}.{name}")
    return value
