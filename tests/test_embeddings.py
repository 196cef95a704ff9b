"""Embeddings on a real engine: any input up to the context, exact usage, refusals that say why."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.proxy.query import groups
from tests.checklist import lines, rows
from tests.gateway import GatewayProcess, running_gateway

# More than the engine's own batch of 512, which would be a 500, and what the engine would round up to.
CONTEXT_TOKENS = 768
MODEL_ID = "vectors"


@pytest.fixture(scope="session")
def vectors(engine: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose only model makes embeddings, of as many at once as no power of two divides."""
    model = {"path": str(demo_model), "kind": "embedding", "context": CONTEXT_TOKENS, "parallel": 3}
    config = {"engine": {"binary": engine}, "memory": {"ram_reserve": "256MiB"}, "models": {MODEL_ID: model}}
    with running_gateway(config, tmp_path_factory.mktemp("vectors")) as running:
        yield running


def post(gateway: GatewayProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": MODEL_ID, **body}, timeout=180)


def test_models_show_the_kind(vectors: GatewayProcess) -> None:
    (model,) = httpx.get(f"{vectors.url}/v1/models").json()["data"]
    assert model["kind"] == "embedding"
    assert model["capabilities"] == ["embedding"]


@lines(83)
def test_83_chat_with_an_embedding_model_is_refused(vectors: GatewayProcess) -> None:
    answer = post(vectors, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi."}])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_endpoint_for_model"
    assert "/v1/embeddings" in answer.json()["error"]["message"]


@pytest.fixture
def client(vectors: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{vectors.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def close_to(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and sum(a * b for a, b in zip(one, other, strict=True)) > 0.999


@rows(35)
def test_the_sdk_gets_vectors_in_the_order_of_its_inputs(client: openai.OpenAI) -> None:
    # The SDK asks for base64 by itself and decodes it.
    both = client.embeddings.create(model=MODEL_ID, input=["the cat", "quantum chromodynamics"])
    assert both.model == MODEL_ID
    assert [item.index for item in both.data] == [0, 1]
    alone = [client.embeddings.create(model=MODEL_ID, input=text) for text in ("the cat", "quantum chromodynamics")]
    # Texts of different lengths side by side: the embedded engine mixes them up unless its slots share their cells.
    for item, one in zip(both.data, alone, strict=True):
        assert close_to(item.embedding, one.data[0].embedding)
    assert both.usage.prompt_tokens == both.usage.total_tokens == sum(one.usage.prompt_tokens for one in alone)


@rows(35)
def test_numbers_and_their_bytes_are_the_same(vectors: GatewayProcess) -> None:
    floats = post(vectors, "/embeddings", input="the cat", encoding_format="float").json()["data"][0]["embedding"]
    packed = post(vectors, "/embeddings", input="the cat", encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(floats)}f", base64.b64decode(packed))) == pytest.approx(floats, abs=1e-6)
    assert sum(number * number for number in floats) == pytest.approx(1, abs=1e-3)


def test_tokens_are_inputs_too(vectors: GatewayProcess) -> None:
    answer = post(vectors, "/v1/embeddings", input=[[504, 3575], [504]]).json()
    assert answer["usage"]["prompt_tokens"] == 3
    assert len(answer["data"]) == 2
    assert len(post(vectors, "/v1/embeddings", input=[504, 3575]).json()["data"]) == 1


@lines(81)
@pytest.mark.slow
def test_81_an_input_of_the_whole_context_is_embedded_and_one_more_token_refused(vectors: GatewayProcess) -> None:
    whole = post(vectors, "/v1/embeddings", input=[504] * CONTEXT_TOKENS)
    assert whole.status_code == 200
    assert whole.json()["usage"]["prompt_tokens"] == CONTEXT_TOKENS
    for long in ([504] * (CONTEXT_TOKENS + 1), "word " * (CONTEXT_TOKENS + 2), ["short", "word " * 100_000]):
        refused = post(vectors, "/v1/embeddings", input=long)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"], error["n_ctx"]) == ("context_length_exceeded", "input", CONTEXT_TOKENS)
        assert "answer" not in error["message"]


@rows(1)
def test_row_1_no_input_is_cut(vectors: GatewayProcess) -> None:
    """The head of a long text decides about its vector, or the text is refused."""
    for words in (60, 3000):
        pair = [post(vectors, "/v1/embeddings", input=head + " word" * words) for head in ("Apples.", "War!")]
        if all(answer.status_code == 200 for answer in pair):
            one, other = (answer.json()["data"][0]["embedding"] for answer in pair)
            assert one != other
            assert all(answer.json()["usage"]["prompt_tokens"] > words for answer in pair)
        else:
            assert {answer.json()["error"]["code"] for answer in pair} == {"context_length_exceeded"}
    assert pair[0].status_code == 400


@lines(82)
@pytest.mark.parametrize("nothing", [[], "", [""], ["a", ""], [[]], None, {}, 5, [1.5], [True], ["a"] * 2049])
def test_82_what_is_no_input_is_refused(nothing: object, vectors: GatewayProcess) -> None:
    answer = post(vectors, "/v1/embeddings", input=nothing)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("input")


@pytest.mark.parametrize(("field", "value"), [("dimensions", 64), ("encoding_format", "int8"), ("input", [49152])])
def test_what_cannot_be_done_is_refused(field: str, value: object, vectors: GatewayProcess) -> None:
    answer = post(vectors, "/v1/embeddings", **{"input": "a", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@lines(83)
def test_83_embeddings_of_a_chat_model_are_refused(gateway: GatewayProcess) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        answer = httpx.post(f"{gateway.url}{path}", json={"model": "smollm2", **body}, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_endpoint_for_model"


@pytest.mark.slow
def test_many_inputs_go_to_the_engine_in_parts(vectors: GatewayProcess) -> None:
    texts = [f"number {number} " + "and so on " * 12 for number in range(20)]
    answer = post(vectors, "/v1/embeddings", input=texts).json()
    assert [item["index"] for item in answer["data"]] == list(range(20))
    last = post(vectors, "/v1/embeddings", input=texts[-1]).json()
    assert close_to(answer["data"][-1]["embedding"], last["data"][0]["embedding"])
    assert answer["usage"]["prompt_tokens"] > CONTEXT_TOKENS


def test_groups_fill_a_context() -> None:
    assert list(groups([5, 5, 5], limit=10)) == [range(2), range(2, 3)]
    assert list(groups([20], limit=10)) == [range(1)]
    assert list(groups([1, 20, 1], limit=10)) == [range(1), range(1, 2), range(2, 3)]
