"""Sliding windows: some layers keep only the last tokens (llama.cpp src/llama-kv-cache-iswa.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from app.memory.families.family import Family, LayerCache, attention_cache
from app.memory.shape import ModelShape


class _Pattern(NamedTuple):
    """One layer in ``period`` sees everything; ``window`` holds when the file names none (0: then no window)."""

    period: int
    window: int = 0
    everything_first: bool = False


# Defaults of llama.cpp's src/models/*.cpp, used when the file has no pattern of its own.
_PATTERNS: Mapping[str, _Pattern] = {
    "afmoe": _Pattern(4),
    "cohere2": _Pattern(4),
    "exaone4": _Pattern(4),
    "gemma2": _Pattern(2, 4096),
    "gemma3": _Pattern(6),
    "gemma3n": _Pattern(5),
    "gemma4": _Pattern(6),
    "gemma-embedding": _Pattern(6),
    "gpt-oss": _Pattern(2),
    "llama4": _Pattern(4, 8192),
    "olmo2": _Pattern(4),
    "plamo3": _Pattern(8),
    "smallthinker": _Pattern(4, 0, everything_first=True),
}
_GEMMA3N_OWN_CACHES = 20


def _layer_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    pattern = _PATTERNS[shape.architecture]
    window = shape.number("attention.sliding_window", pattern.window)
    slides = _sliding_layers(shape, pattern) if window else (False,) * shape.layers
    own = _own_caches(shape)
    return tuple(_cache(shape, layer, window if slides[layer] else 0, layer < own) for layer in range(shape.layers))


def _cache(shape: ModelShape, layer: int, window: int, own: bool) -> LayerCache:
    if not own:
        return LayerCache()
    if not window:
        return attention_cache(shape, layer)
    heads = shape.kv_heads[layer]
    key = shape.number("attention.key_length_swa", shape.key_length)
    value = shape.number("attention.value_length_swa", shape.value_length)
    return LayerCache(key * heads, value * heads, window)


def _sliding_layers(shape: ModelShape, pattern: _Pattern) -> tuple[bool, ...]:
    """Which layers have a window: by the file's own array or period, else by the architecture's default."""
    stated = shape.facts.value("attention.sliding_window_pattern")
    if isinstance(stated, tuple):
        return tuple(slides != 0 for slides in shape.facts.per_layer("attention.sliding_window_pattern", 0))
    period = shape.number("attention.sliding_window_pattern", pattern.period)
    full = 0 if pattern.everything_first else period - 1
    return tuple(period > 0 and layer % period != full for layer in range(shape.layers))


def _own_caches(shape: ModelShape) -> int:
    """Layers from the start that own a cache; later ones reuse those (gemma3n, gemma4)."""
    if shape.architecture == "gemma3n":
        return _GEMMA3N_OWN_CACHES
    return shape.layers - shape.number("attention.shared_kv_layers")


def _family(architectures: frozenset[str], layer_caches: Callable[[ModelShape], tuple[LayerCache, ...]]) -> Family:
    return Family("sliding window", architectures, layer_caches)


FAMILIES = (
    _family(frozenset(_PATTERNS) - {"cohere2", "gemma3n", "gemma4", "llama4"}, _layer_caches),
    # Three more streams beside the one that others have.
    Family("sliding window", frozenset({"gemma3n"}), _layer_caches, extra_rows=3, pipeline_rows=(48, 60)),
    # Attention and feed-forward of a layer are computed side by side.
    Family("sliding window", frozenset({"cohere2"}), _layer_caches, extra_rows=3),
    Family("chunked attention", frozenset({"llama4"}), _layer_caches, chunks=True),
    Family("sliding window", frozenset({"gemma4"}), _layer_caches, whole_experts=True, pipeline_rows=(14, 6)),
)
