"""What a loaded model can take in, and a conversation made fit for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidValue, UnsupportedParameter

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Abilities:
    """Found out at load; the defaults are for an engine that cannot be asked, whose own word then counts.

    ``tools``: its chat template shows them to the model; ``late_system``: system messages may stand anywhere.
    """

    tools: bool = True
    late_system: bool = True
    images: bool = False
    audio: bool = False


def require_media(media: Collection[str], abilities: Abilities) -> None:
    """Raises InvalidValue for a picture or a recording that the model cannot take in."""
    for kind, is_able, what in (
        ("image_url", abilities.images, "pictures"),
        ("input_audio", abilities.audio, "recordings"),
    ):
        if kind in media and not is_able:
            raise InvalidValue(
                f"This model takes no {what}; leave out the parts of type '{kind}', or use a model that does.",
                param="messages",
            )


def with_tools_looked_at(fields: Mapping[str, Any], abilities: Abilities) -> tuple[Mapping[str, Any], Headers]:
    """Tools that the template would drop: a call that must come is refused, one that may come is answered without.

    Raises UnsupportedParameter.
    """
    if abilities.tools or "tools" not in fields or fields.get("tool_choice") == "none":
        return fields, []
    if fields.get("tool_choice") == "required":
        raise UnsupportedParameter(
            "This model's chat template has no place for tools, so it cannot be made to call one; "
            "use a model with tool support, or leave tool_choice at auto.",
            param="tool_choice",
        )
    # Passed on they would still change the engine's grammar and parser for an answer that cannot hold a call.
    kept = {name: value for name, value in fields.items() if name not in _TOOL_FIELDS}
    return kept, [(b"x-tools-ignored", b"the chat template of this model has no place for tools")]


_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


def with_one_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Later system messages joined to the first, for a template that refuses them elsewhere."""
    late = [message for message in messages[1:] if message["role"] == "system"]
    if not late:
        return list(messages)
    rest = [message for message in messages if message["role"] != "system"]
    first = [messages[0]] if messages[0]["role"] == "system" else []
    return [{"role": "system", "content": _joined([*first, *late])}, *rest]


def _joined(messages: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
