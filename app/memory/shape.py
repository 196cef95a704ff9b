"""Hyperparameters that the formulas use, checked once because a header may claim anything."""

from __future__ import annotations

from dataclasses import dataclass

from app.gguf import ModelFacts

_MOST_BLOCKS = 4096
_MOST = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model in llama.cpp's terms (src/llama-hparams.h).

    ``blocks`` counts draft-head blocks at the end of the stack, ``layers`` does not; ``heads`` and ``kv_heads`` have
    one entry per block; widths are in elements.
    """

    facts: ModelFacts
    architecture: str
    blocks: int
    layers: int
    embedding: int
    vocabulary: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    feed_forward: int
    experts: int
    experts_used: int
    expert_feed_forward: int

    def number(self, key: str, default: int = 0) -> int:
        """A further key of the architecture, within sane bounds. Raises ModelFileError."""
        return _bounded(self.facts, key, default=default)


def read_shape(facts: ModelFacts) -> ModelShape:
    """Take the hyperparameters from ``facts``. Raises ModelFileError naming the key that cannot be right."""
    blocks = _bounded(facts, "block_count", least=1, most=_MOST_BLOCKS)
    embedding = _bounded(facts, "embedding_length", least=1)
    following = _bounded(facts, "nextn_predict_layers", default=0)
    if following >= blocks:
        raise facts.wrong("nextn_predict_layers", f"is {following} of {blocks} blocks")
    heads = _heads(facts, "attention.head_count", (0,) * blocks)
    kv_heads = _heads(facts, "attention.head_count_kv", heads)
    most_heads = max(heads)
    head_length = embedding // most_heads if most_heads else 0
    feed_forward = _bounded(facts, "feed_forward_length", default=0)
    return ModelShape(
        facts=facts,
        architecture=facts.architecture,
        blocks=blocks,
        layers=blocks - following,
        embedding=embedding,
        vocabulary=min(facts.vocabulary_size, _MOST),
        heads=heads,
        kv_heads=kv_heads,
        key_length=_bounded(facts, "attention.key_length", default=head_length),
        value_length=_bounded(facts, "attention.value_length", default=head_length),
        feed_forward=feed_forward,
        experts=_bounded(facts, "expert_count", default=0),
        experts_used=_bounded(facts, "expert_used_count", default=0),
        expert_feed_forward=_bounded(facts, "expert_feed_forward_length", default=feed_forward),
    )


def _bounded(facts: ModelFacts, key: str, *, default: int | None = None, least: int = 0, most: int = _MOST) -> int:
    if default is None and facts.value(key) is None:
        raise facts.wrong(key, "is missing")
    value = facts.integer(key, default or 0)
    if not least <= value <= most:
        raise facts.wrong(key, f"is {value}, outside {least} to {most}")
    return value


def _heads(facts: ModelFacts, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    if facts.value(key) is None:
        return default
    heads = facts.per_layer(key, 0)
    if not all(0 <= count <= _MOST for count in heads):
        raise facts.wrong(key, f"is outside 0 to {_MOST}")
    return heads
