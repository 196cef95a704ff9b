"""Ask a loaded engine what its model's template can take in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.errors import GatewayError
from app.protocol import Abilities
from app.tokens import RenderSource

_MARK = "a-remark-in-the-middle"
_TOOL_NAME = "look_up_the_weather"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_HELLO = {"role": "user", "content": "hello"}
_LATE = [_HELLO, {"role": "assistant", "content": "hi"}, {"role": "system", "content": _MARK}, _HELLO]


async def learn_abilities(source: RenderSource, properties: Mapping[str, Any]) -> Abilities:
    """Render what a template may refuse or drop, and see; ``properties`` are those of ``/props``."""
    modalities = properties.get("modalities") or {}
    return Abilities(
        tools=await _shows(source, {"messages": [_HELLO], "tools": [_TOOL]}, _TOOL_NAME),
        late_system=await _shows(source, {"messages": _LATE}, _MARK),
        images=bool(modalities.get("vision")),
        audio=bool(modalities.get("audio")),
    )


async def _shows(source: RenderSource, body: Mapping[str, Any], mark: str) -> bool:
    try:
        return mark in await source.render(orjson.dumps(body))
    except GatewayError:
        # The template raised, or the engine cannot render at all: then it will say so itself.
        return False
