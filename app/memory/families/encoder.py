"""Models that answer once for a whole text: no cache at all, or a decoder's cache that is never kept."""

from __future__ import annotations

from app.gguf import ENCODERS
from app.memory.families.family import Family, LayerCache
from app.memory.shape import ModelShape


def _layer_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    return (LayerCache(),) * shape.layers


FAMILIES = (Family("encoder", ENCODERS, _layer_caches, causal=False),)
