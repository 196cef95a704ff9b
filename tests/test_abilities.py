"""What the loaded model's template can take in, on the real engine."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from tests.checklist import rows
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess

_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


def _chat(gateway: GatewayProcess, **fields: Any) -> httpx.Response:
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": "How old are you?"}], "max_tokens": 4}
    return httpx.post(gateway.url + "/v1/chat/completions", json=body | fields, timeout=60)


@rows(12)
def test_tools_that_the_template_drops_are_announced_or_refused(gateway: GatewayProcess) -> None:
    """Row 12 of the reports: SmolLM2's template renders the same prompt with and without tools."""
    plain, with_tools = _chat(gateway), _chat(gateway, tools=[_TOOL])
    assert with_tools.status_code == 200
    assert "no place for tools" in with_tools.headers["x-tools-ignored"]
    assert "x-tools-ignored" not in plain.headers
    assert with_tools.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        refused = _chat(gateway, tools=[_TOOL], tool_choice=choice)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "unsupported_parameter"
        assert refused.json()["error"]["param"] == "tool_choice"


@rows(11)
@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_schema_is_kept_or_the_answer_is_an_error(gateway: GatewayProcess, stream: bool) -> None:
    """Row 11: the engine's grammar is a help, the check of the finished document is the promise."""
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": _SCHEMA, "strict": True}}
    answer = _chat(gateway, response_format=form, max_tokens=48, stream=stream, seed=1, temperature=0)
    assert answer.status_code == 200
    if stream:
        chunks = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        content = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(orjson.loads(content)["age"], int)


@rows(10)
def test_a_late_system_message_is_answered(gateway: GatewayProcess) -> None:
    """Row 10, on a template that takes it; the joining for others is in test_expectation.py."""
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go on."},
    ]
    assert _chat(gateway, messages=messages).status_code == 200
