"""Latent attention (MLA): one compressed K per cell and no V (llama.cpp src/llama-kv-cache.cpp)."""

from __future__ import annotations

from app.memory.families.family import Family, LayerCache, attention_cache
from app.memory.shape import ModelShape

_ARCHITECTURES = "deepseek2 deepseek2-ocr minicpm3 plm"


def latent_cache(shape: ModelShape, layer: int) -> LayerCache:
    """K only, when the file was converted for it; older files keep K and V of every head."""
    if shape.number("attention.key_length_mla") and shape.number("attention.value_length_mla"):
        return LayerCache(key=shape.key_length * max(1, shape.kv_heads[layer]))
    return attention_cache(shape, layer)


def _layer_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    return tuple(latent_cache(shape, layer) for layer in range(shape.layers))


FAMILIES = (Family("latent attention", frozenset(_ARCHITECTURES.split()), _layer_caches),)
