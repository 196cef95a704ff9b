"""llama-server's own form of a completion, on a real engine."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from app.errors import InvalidValue
from app.protocol import native_request
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.gateway import GatewayProcess

PROMPT = "The sky is blue because"


def post(gateway: GatewayProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(gateway.url + path, json={"prompt": PROMPT, "temperature": 0, **body}, timeout=60)


def test_it_says_what_openais_form_says(gateway: GatewayProcess) -> None:
    choice = post(gateway, "/v1/completions", model=MODEL_ID, max_tokens=8).json()["choices"][0]
    # Where there is one model nobody needs to name it.
    whole = post(gateway, "/completion", n_predict=8).json()
    assert (whole["content"], whole["model"], whole["stop"]) == (choice["text"], MODEL_ID, True)
    assert (whole["tokens_predicted"], whole["stop_type"], whole["truncated"]) == (8, "limit", False)
    stream = post(gateway, "/completion", n_predict=8, stream=True).text
    events = [orjson.loads(event.removeprefix("data: ")) for event in stream.split("\n\n") if event]
    assert "".join(event["content"] for event in events) == choice["text"]
    assert (events[-1]["stop"], events[-1]["tokens_evaluated"]) == (True, whole["tokens_evaluated"])


def test_more_than_the_context_is_refused(gateway: GatewayProcess) -> None:
    answer = post(gateway, "/completion", prompt="sky " * (CONTEXT_TOKENS + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("limit", "tokens"), [({}, None), ({"n_predict": -1}, None), ({"n_predict": 7}, 7)])
def test_a_limit_or_the_models_own(limit: dict[str, int], tokens: int | None) -> None:
    assert native_request({"model": "m", "prompt": "a", **limit}).max_tokens == tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_predict", 0),
        ("n_predict", -2),
        ("grammar", 'root ::= "a"'),
        ("json_schema", {"type": "object"}),
        ("n_probs", 3),
        ("image_data", [{"data": "", "id": 1}]),
        ("prompt", ["a", "b"]),
        ("prompt", ""),
    ],
)
def test_what_cannot_be_done_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        native_request({"model": "m", "prompt": "a", field: value})
    assert refused.value.param == field
