"""The messages of a conversation, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import InvalidValue

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_AUDIO = ("wav", "mp3")
_MAX_MESSAGES = 4096


def conversation(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The field ``messages``; raises InvalidValue naming the message and its field."""
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
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return
    if kind == "image_url":
        _check_image(part.get("image_url"), f"{where}.image_url")
    elif kind == "input_audio":
        _check_audio(part.get("input_audio"), f"{where}.input_audio")
    else:
        raise InvalidValue(
            f"'{where}' must be a part of type 'text', 'image_url' or 'input_audio' with what belongs to it.",
            param=where,
        )


def _check_image(image: Any, where: str) -> None:
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str) or not url.lower().startswith(("data:", "http://", "https://")):
        raise InvalidValue(f"'{where}.url' must be a data: URL of a picture.", param=f"{where}.url")


def _check_audio(audio: Any, where: str) -> None:
    if not isinstance(audio, dict) or not isinstance(audio.get("data"), str) or audio.get("format") not in _AUDIO:
        raise InvalidValue(
            f"'{where}' must hold 'data' in base64 and a 'format' of {' or '.join(_AUDIO)}.", param=where
        )


def media_of(messages: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The kinds of parts beside text: ``image_url``, ``input_audio``."""
    return frozenset(
        part["type"]
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if part["type"] != "text"
    )
