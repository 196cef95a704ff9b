"""Turns of content blocks → the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from app.errors import InvalidValue
from app.protocol.fields import check_size

_ROLES = frozenset({"user", "assistant", "system"})
# Claude Code puts one before its system prompt; it differs each time, so that no prompt would find its cache again.
_BILLING_MARK = "x-anthropic-billing-header:"


class _Block(NamedTuple):
    """A content block and the name by which an error calls it."""

    where: str
    fields: Mapping[str, Any]

    @property
    def type(self) -> str:
        return str(self.fields.get("type"))

    def text(self, name: str = "text") -> str:
        """A field that must be a string; raises InvalidValue."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise InvalidValue(f"'{self.where}.{name}' must be a string.", param=f"{self.where}.{name}")
        return value

    def unsupported(self, allowed: str) -> InvalidValue:
        return InvalidValue(
            f"'{self.where}' is a block of type {self.type[:64]!r}; this gateway takes {allowed} here.",
            param=self.where,
        )


class _Turn(NamedTuple):
    role: str
    blocks: list[_Block]


def chat_messages(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``system`` and ``messages`` as a chat; raises InvalidValue that names the block.

    Turns of one role that follow each other become one, as in Anthropic's API.
    """
    messages = [message for turn in _merged(_turns(document)) for message in _messages_of(turn)]
    if (system := _system(document)) is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _system(document: Mapping[str, Any]) -> str | None:
    if document.get("system") is None:
        return None
    texts = [_text_of(block) for block in _blocks(document["system"], "system")]
    return "\n".join(text for text in texts if not text.startswith(_BILLING_MARK)) or None


def _turns(document: Mapping[str, Any]) -> Iterator[_Turn]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidValue("'messages' must be a list of at least one message.", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidValue(f"'{where}' must be an object.", param=where)
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidValue(f"'{where}.role' must be user or assistant.", param=f"{where}.role")
        yield _Turn(role, _blocks(message.get("content"), f"{where}.content"))


def _blocks(content: Any, where: str) -> list[_Block]:
    if isinstance(content, str):
        return [_Block(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise InvalidValue(f"'{where}' must be a string or a list of blocks.", param=where)
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidValue(f"'{where}[{index}]' must be an object with a type.", param=f"{where}[{index}]")
    return [_Block(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _merged(turns: Iterator[_Turn]) -> list[_Turn]:
    merged: list[_Turn] = []
    for turn in turns:
        if merged and merged[-1].role == turn.role:
            merged[-1].blocks.extend(turn.blocks)
        else:
            merged.append(turn)
    return merged


def _messages_of(turn: _Turn) -> Iterator[dict[str, Any]]:
    if turn.role == "system":
        yield {"role": "system", "content": "\n".join(map(_text_of, turn.blocks))}
    elif turn.role == "assistant":
        yield _assistant(turn.blocks)
    else:
        yield from _user(turn.blocks)


def _user(blocks: Sequence[_Block]) -> Iterator[dict[str, Any]]:
    """The results of tools first: templates want them right behind their calls."""
    results = [block for block in blocks if block.type == "tool_result"]
    for block in results:
        yield {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": _result(block)}
    rest = [block for block in blocks if block.type != "tool_result"]
    if rest or not results:
        yield {"role": "user", "content": _joined([_part(block) for block in rest])}


def _result(block: _Block) -> str | list[dict[str, Any]]:
    content = block.fields.get("content")
    parts = [] if content is None else [_part(inner) for inner in _blocks(content, f"{block.where}.content")]
    if block.fields.get("is_error"):
        # A chat has no mark for it; the word is what models are used to.
        parts.insert(0, {"type": "text", "text": "Error:"})
    return _joined(parts)


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text, as the engine itself joins them for templates that take no parts, unless there is more than text."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: _Block) -> dict[str, Any]:
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block)}}
    return {"type": "text", "text": _text_of(block)}


def _text_of(block: _Block) -> str:
    if block.type == "text":
        return block.text()
    if block.type == "document":
        return _document_text(block)
    if block.type == "search_result":
        inner = [_text_of(each) for each in _blocks(block.fields.get("content"), f"{block.where}.content")]
        return "\n".join([block.text("title"), block.text("source"), *inner])
    raise block.unsupported("text, image, document, search_result and tool_result")


def _document_text(block: _Block) -> str:
    source = _source(block)
    heads = [str(block.fields[name]) for name in ("title", "context") if block.fields.get(name)]
    if source.type == "text":
        return "\n".join([*heads, source.text("data")])
    if source.type == "content":
        inner = _blocks(source.fields.get("content"), f"{source.where}.content")
        return "\n".join([*heads, *map(_text_of, inner)])
    raise source.unsupported("documents as plain text (source types text and content)")


def _image_url(block: _Block) -> str:
    source = _source(block)
    if source.type == "base64":
        return f"data:{source.text('media_type')};base64,{source.text('data')}"
    if source.type == "url":
        return source.text("url")
    raise source.unsupported("images as base64")


def _source(block: _Block) -> _Block:
    source = block.fields.get("source")
    if not isinstance(source, dict):
        raise InvalidValue(f"'{block.where}.source' must be an object.", param=f"{block.where}.source")
    return _Block(f"{block.where}.source", source)


def _assistant(blocks: Sequence[_Block]) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.text())
            case "thinking":
                thoughts.append(block.text("thinking"))
            case "redacted_thinking":
                pass  # written by a provider that alone can read it
            case "tool_use":
                calls.append(_call(block))
            case _:
                raise block.unsupported("text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts and any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: _Block) -> dict[str, Any]:
    arguments = block.fields.get("input")
    if not isinstance(arguments, dict):
        raise InvalidValue(f"'{block.where}.input' must be an object.", param=f"{block.where}.input")
    # Everything else is looked at as a part of the chat; this becomes a text of it.
    check_size({f"{block.where}.input": arguments})
    function = {"name": block.text("name"), "arguments": orjson.dumps(arguments).decode()}
    return {"id": block.text("id"), "type": "function", "function": function}
