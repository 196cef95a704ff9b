"""Anthropic's events read back to the message that they make, strictly: anything out of order is an error."""

from __future__ import annotations

from typing import Any

import orjson

_PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def events(stream: bytes) -> list[dict[str, Any]]:
    """The documents; each event is named like its document's type."""
    found = []
    for event in stream.removesuffix(b"\n\n").split(b"\n\n") if stream else []:
        name, _, data = event.partition(b"\n")
        document = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + document["type"].encode()
        found.append(document)
    return found


def folded(stream: bytes) -> dict[str, Any]:
    """The whole message; inputs of tools are parsed, or left as text where they are cut off."""
    start, *middle, delta, stop = events(stream)
    assert start["type"] == "message_start"
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    is_open = False
    for event in middle:
        is_open = _apply(event, message["content"], is_open=is_open)
    assert not is_open
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = _parsed(block.pop("partial_json", ""))
    return message | delta["delta"] | {"usage": delta["usage"]}


def _apply(event: dict[str, Any], content: list[dict[str, Any]], *, is_open: bool) -> bool:
    if event["type"] == "content_block_start":
        assert not is_open
        assert event["index"] == len(content)
        content.append(event["content_block"])
        return True
    assert is_open
    assert event["index"] == len(content) - 1
    if event["type"] == "content_block_delta":
        field = _PIECES[event["delta"]["type"]]
        assert field in content[-1] or field == "partial_json"
        content[-1][field] = content[-1].get(field, "") + event["delta"][field]
        return True
    assert event["type"] == "content_block_stop"
    return False


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments) if arguments else {}
    except orjson.JSONDecodeError:
        return arguments
