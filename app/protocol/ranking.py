"""Ranking: how relevant documents are to a query, in the words of Jina's API and of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from app.errors import InvalidValue
from app.protocol.fields import MAX_INTEGER, boolean, integer, model_name, parse_object
from app.protocol.prompts import Prompt
from app.protocol.question import Part

_MAX_DOCUMENTS = 2048


@dataclass(frozen=True, slots=True)
class RankRequest:
    """One parsed request; ``is_bare`` answers with a bare array, as text-embeddings-inference does."""

    endpoint: ClassVar[str] = "rerank"
    route: ClassVar[str] = "/v1/rerank"

    model: str
    query: str
    inputs: tuple[str, ...]
    most: int
    with_documents: bool
    is_bare: bool

    @property
    def field(self) -> str:
        """What the client calls the documents."""
        return "texts" if self.is_bare else "documents"

    @property
    def beside(self) -> Prompt:
        """The query is read with each document."""
        return self.query

    def part(self, start: int, end: int) -> dict[str, Any]:
        """What the engine gets for these documents."""
        return {"query": self.query, "documents": self.inputs[start:end]}

    def answer(self, parts: Sequence[Part], *, model_id: str) -> bytes:
        """The most relevant first; raises KeyError, TypeError or ValueError for parts that are none."""
        scores: dict[int, float] = {
            part.start + int(item["index"]): float(item["relevance_score"])
            for part in parts
            for item in part.document["results"]
        }
        if sorted(scores) != list(range(len(self.inputs))):
            raise ValueError("not a score for each document")
        order = sorted(scores, key=lambda index: (-scores[index], index))[: self.most]
        tokens = sum(part.tokens for part in parts)
        if self.is_bare:
            return orjson.dumps([{"index": index, "score": scores[index], **self._text(index)} for index in order])
        results = [{"index": index, "relevance_score": scores[index], **self._text(index)} for index in order]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return orjson.dumps({"object": "list", "model": model_id, "results": results, "usage": usage})

    def _text(self, index: int) -> dict[str, Any]:
        if not self.with_documents:
            return {}
        return {"text": self.inputs[index]} if self.is_bare else {"document": {"text": self.inputs[index]}}


def parse_rank_request(body: bytes) -> RankRequest:
    """Check a body of ``/v1/rerank``; raises RequestError or InvalidValue."""
    document = parse_object(body)
    is_bare = document.get("documents") is None and document.get("texts") is not None
    query = document.get("query")
    if not isinstance(query, str) or not query:
        raise InvalidValue("'query' must be a non-empty string.", param="query")
    documents = _documents(document, "texts" if is_bare else "documents")
    return RankRequest(
        model=model_name(document),
        query=query,
        inputs=documents,
        most=integer(document, "top_n", low=1, high=MAX_INTEGER) or len(documents),
        with_documents=boolean(document, "return_text" if is_bare else "return_documents"),
        is_bare=is_bare,
    )


def _documents(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = document.get(name)
    if not isinstance(value, list) or not value or len(value) > _MAX_DOCUMENTS:
        raise InvalidValue(f"'{name}' must be an array of 1 to {_MAX_DOCUMENTS} documents.", param=name)
    return tuple(_text(entry, f"{name}[{index}]") for index, entry in enumerate(value))


def _text(entry: Any, where: str) -> str:
    text = entry.get("text") if isinstance(entry, dict) else entry
    if not isinstance(text, str) or not text:
        raise InvalidValue(f"'{where}' must be a non-empty string, or an object with one as 'text'.", param=where)
    return text
