"""What an architecture family tells the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from app.memory.shape import ModelShape


class LayerCache(NamedTuple):
    """What one layer keeps: K and V elements per cell, its window (0: every cell), f32 state elements per sequence."""

    key: int = 0
    value: int = 0
    window: int = 0
    state: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """Formulas of a group of architectures.

    ``layer_caches`` has one entry per layer, draft-head blocks left out. The rest are terms of the compute buffer:
    ``extra_rows`` rows of the embedding width beyond the usual ones; ``scans`` says that recurrent layers are
    state-space scans, wider than attention, ``first_scans`` that they are those of Mamba-1, which the engine computes
    in RAM. ``host_copies`` is how many times K and V of a layer in RAM are on the device that computes it; with 0 such
    layers are computed in RAM. Experts in RAM are copied one tensor after the other, but with ``chunks`` those of a
    layer with a window and of one without at once, with ``pairs`` those of a recurrent layer and of the attention
    after it, with ``whole_experts`` all of the first layer without a window. ``pipeline_rows`` are embedding rows
    beyond the usual ones that are handed on between pipelined devices, on the first of them and on each other.
    """

    name: str
    architectures: frozenset[str]
    layer_caches: Callable[[ModelShape], tuple[LayerCache, ...]]
    known: bool = True
    causal: bool = True
    extra_rows: int = 0
    hybrid: bool = False
    scans: bool = False
    host_copies: float = 1.0
    chunks: bool = False
    pairs: bool = False
    whole_experts: bool = False
    first_scans: bool = False
    pipeline_rows: tuple[int, int] = (0, 0)


def attention_cache(shape: ModelShape, layer: int, *, window: int = 0) -> LayerCache:
    """K and V of a plain attention layer (llama.cpp src/llama-kv-cache.cpp, n_embd_k_gqa and n_embd_v_gqa)."""
    heads = shape.kv_heads[layer]
    return LayerCache(shape.key_length * heads, shape.value_length * heads, window)
