"""Thinking through Anthropic's SDK on a real engine: wished for, bounded, hidden, and counted when it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.conftest import MODEL_ID
from tests.gateway import running_gateway
from tests.thinking_model import thinking_model

QUESTION: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
BUDGET = 8


@pytest.fixture(scope="module")
def client(
    one_engine: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[anthropic.Anthropic]:
    folder = tmp_path_factory.mktemp("thinking")
    config = {
        "engine": {"binary": one_engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {MODEL_ID: thinking_model(demo_model, folder, context=512)},
    }
    with (
        running_gateway(config, folder) as gateway,
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def _asked(thinking: dict[str, Any], **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL_ID, "max_tokens": 24, "messages": QUESTION, "thinking": thinking}
    return asked | {"extra_body": {"temperature": 0}} | fields


def test_the_budget_ends_the_thought_and_the_answer_follows(client: anthropic.Anthropic) -> None:
    thinking = {"type": "enabled", "budget_tokens": BUDGET}
    message = client.messages.create(**_asked(thinking))
    thought, text = message.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert 0 < len(thought.thinking.split()) <= BUDGET
    assert text.text
    with client.messages.stream(**_asked(thinking)) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("thinking") > 1
    assert kinds.count("signature") == 1
    assert streamed.content[0].to_dict() == thought.to_dict()
    # A conversation holds its thoughts, and they are counted.
    history = [*QUESTION, message.to_param(), *QUESTION]
    without: list[Any] = [*QUESTION, {"role": "assistant", "content": text.text}, *QUESTION]
    counts = [client.messages.count_tokens(model=MODEL_ID, messages=each).input_tokens for each in (history, without)]
    assert counts[0] > counts[1]
    answer = client.messages.create(model=MODEL_ID, max_tokens=1, messages=history)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == counts[0]


def test_no_thinking(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**_asked({"type": "disabled"}, max_tokens=4))
    assert [block.type for block in message.content] == ["text"]


def test_thinking_that_is_omitted_is_not_sent(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**_asked({"type": "adaptive", "display": "omitted"}, max_tokens=4))
    (thought,) = message.content
    assert (thought.type, thought.thinking) == ("thinking", "")
    assert thought.signature
