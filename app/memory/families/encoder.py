"""Models that answer once for a whole text: no cache at all, or a decoder's cache that is never kept."""

from __future__ import annotations

from app.memory.families.family import Family, LayerCache
from app.memory.shape import ModelShape

_ARCHITECTURES = "bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3 neo-bert eurobert modern-bert t5encoder"


def _layer_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    return (LayerCache(),) * shape.layers


FAMILIES = (Family("encoder", frozenset(_ARCHITECTURES.split()), _layer_caches, causal=False),)
