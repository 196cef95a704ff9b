"""What a model is for, read from its file."""

from __future__ import annotations

from enum import StrEnum

from app.gguf.facts import ModelFacts

ENCODERS = frozenset(
    {
        "bert",
        "eurobert",
        "jina-bert-v2",
        "jina-bert-v3",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "t5encoder",
    }
)
"""Architectures that read a whole text at once and write none."""

# llama.cpp's enum llama_pooling_type.
_POOLINGS = ("none", "mean", "cls", "last", "rank")


class Kind(StrEnum):
    """What a model answers with: text, vectors, or the relevance of documents."""

    CHAT = "chat"
    EMBEDDING = "embedding"
    RERANK = "rerank"


def natural_kind(facts: ModelFacts) -> Kind:
    """What the file says the model is for: a classifier's head ranks, a pooling embeds, everything else writes."""
    pooling = file_pooling(facts)
    if pooling == "rank" or any(tensor.name.startswith("cls.") for tensor in facts.tensors):
        return Kind.RERANK
    if pooling in {"mean", "cls", "last"} or facts.architecture in ENCODERS:
        return Kind.EMBEDDING
    return Kind.CHAT


def needed_pooling(kind: Kind, facts: ModelFacts) -> str | None:
    """What the engine must be told: without a pooling it has a vector for each token, which is no embedding."""
    if kind is Kind.RERANK:
        return "rank"
    is_said = file_pooling(facts) in {"mean", "cls", "last"}
    return "mean" if kind is Kind.EMBEDDING and not is_said else None


def file_pooling(facts: ModelFacts) -> str | None:
    """How the file says that the vectors of a text become one, None when it does not say."""
    number = facts.value("pooling_type")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(_POOLINGS):
        return None
    return _POOLINGS[number]
