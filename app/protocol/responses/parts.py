"""The parts of a message's content, as the chat API has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import InvalidValue, UnsupportedParameter

_TEXT = ("input_text", "output_text", "text")


def chat_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a chat message; raises InvalidValue naming the part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"'{where}' must be a string or a list of parts.", param=where)
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    # One text is the same as a list of it, and lets the prompt be bounded without being rendered.
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def joined_text(parts: Any, where: str) -> str:
    """The texts of a list of parts; raises InvalidValue."""
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise InvalidValue(f"'{where}' must be a list of parts.", param=where)
    return "\n".join(_text(part, "text", f"{where}[{index}]") for index, part in enumerate(parts))


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT:
        return {"type": "text", "text": _text(part, "text", where)}
    if kind == "refusal":
        return {"type": "text", "text": _text(part, "refusal", where)}
    if kind == "input_image":
        return _image(part, where)
    if kind == "input_file":
        raise UnsupportedParameter(
            f"'{where}' is a file, which no model here reads; send its text as 'input_text'.", param=where
        )
    raise InvalidValue(f"'{where}.type' must be 'input_text', 'output_text' or 'input_image'.", param=where)


def _text(part: Any, name: str, where: str) -> str:
    text = part.get(name) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise InvalidValue(f"'{where}.{name}' must be a string.", param=where)
    return text


def _image(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    url = part.get("image_url")
    if not isinstance(url, str):
        raise UnsupportedParameter(
            f"'{where}.image_url' is missing: files are not stored here; send the image as a data: URL.", param=where
        )
    detail = part.get("detail")
    return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail is not None else {})}
