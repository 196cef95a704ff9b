"""Ranking on a real engine, with a tiny model that has a classifier's head and random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.errors import InvalidValue
from app.protocol import parse_rank_request
from tests.checklist import rows
from tests.gateway import GatewayProcess, running_gateway
from tests.gguf_writer import U32, Tensor
from tests.random_model import write_random
from tests.shapes import dense, uniform

CONTEXT_TOKENS = 256
MODEL_ID = "ranker"
DOCUMENTS = ["a word1", "b word2 word3", "zzzz", "the cat sat on the mat"]


def rank_model(path: Path) -> Path:
    """qwen3 with two layers, which yes and no come out of."""
    keys = {"pooling_type": U32(4), "classifier.output_labels": ["yes", "no"]}
    sizes: dict[str, Any] = {"layers": 2, "embedding": 64, "heads": 4, "kv_heads": 2, "head_length": 16}
    shape = dense(
        architecture="qwen3",
        feed_forward=128,
        vocabulary=512,
        context=1024,
        kind=uniform("F32"),
        keys=keys,
        **sizes,
    )
    return write_random(path, replace(shape, tensors=[*shape.tensors, Tensor("cls.output.weight", (64, 2), "F32")]))


@pytest.fixture(scope="module")
def ranker(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose only model says by its file that it ranks."""
    folder = tmp_path_factory.mktemp("ranker")
    model = {"path": str(rank_model(folder / "rank.gguf")), "context": CONTEXT_TOKENS, "parallel": 2}
    config = {"engine": {"binary": engine}, "memory": {"ram_reserve": "256MiB"}, "models": {MODEL_ID: model}}
    with running_gateway(config, folder) as running:
        yield running


def post(gateway: GatewayProcess, path: str = "/v1/rerank", **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": MODEL_ID, "query": "cat?", **body}, timeout=120)


def test_models_show_the_kind_of_the_file(ranker: GatewayProcess) -> None:
    (model,) = httpx.get(f"{ranker.url}/v1/models").json()["data"]
    assert (model["kind"], model["capabilities"]) == ("rerank", ["rerank"])


def test_the_most_relevant_comes_first(ranker: GatewayProcess) -> None:
    answer = post(ranker, documents=DOCUMENTS).json()
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2, 3]
    assert answer["model"] == MODEL_ID
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(DOCUMENTS)


def test_the_first_few_with_their_texts(ranker: GatewayProcess) -> None:
    every = post(ranker, documents=DOCUMENTS).json()["results"]
    two = post(ranker, "/rerank", documents=[{"text": text} for text in DOCUMENTS], top_n=2, return_documents=True)
    results = two.json()["results"]
    assert [result["index"] for result in results] == [result["index"] for result in every[:2]]
    assert all(result["document"] == {"text": DOCUMENTS[result["index"]]} for result in results)


def test_the_words_of_text_embeddings_inference(ranker: GatewayProcess) -> None:
    scores = post(ranker, "/rerank", texts=DOCUMENTS, return_text=True).json()
    every = post(ranker, "/v1/reranking", documents=DOCUMENTS).json()["results"]
    assert [score["index"] for score in scores] == [result["index"] for result in every]
    assert [score["score"] for score in scores] == [result["relevance_score"] for result in every]
    assert all(score["text"] == DOCUMENTS[score["index"]] for score in scores)


@rows(1)
@pytest.mark.parametrize("letters", [CONTEXT_TOKENS - 5, CONTEXT_TOKENS, 10 * CONTEXT_TOKENS])
def test_row_1_a_document_is_read_whole_or_refused(letters: int, ranker: GatewayProcess) -> None:
    answer = post(ranker, documents=["short", "~" * letters])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["n_ctx"] == CONTEXT_TOKENS
    assert post(ranker, documents=["short", "~" * (CONTEXT_TOKENS - 20)]).status_code == 200


def test_a_model_that_ranks_does_not_chat(ranker: GatewayProcess) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ):
        answer = post(ranker, path, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_endpoint_for_model")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query", ""),
        ("query", 5),
        ("documents", []),
        ("documents", "a"),
        ("documents", ["a", ""]),
        ("documents", [{"title": "a"}]),
        ("documents", ["a"] * 2049),
        ("top_n", 0),
        ("top_n", True),
        ("return_documents", 1),
    ],
)
def test_what_cannot_be_ranked_is_refused(field: str, value: object) -> None:
    body = {"model": MODEL_ID, "query": "a", "documents": ["a"], field: value}
    with pytest.raises(InvalidValue) as refused:
        parse_rank_request(orjson.dumps(body))
    assert (refused.value.param or "").startswith(field)
