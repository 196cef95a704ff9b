"""Recurrent layers keep one f32 state per sequence instead of K and V (llama.cpp src/llama-memory-recurrent.cpp)."""

from __future__ import annotations

from dataclasses import replace

from app.memory.families.family import Family, LayerCache, attention_cache
from app.memory.families.latent import latent_cache
from app.memory.shape import ModelShape

_DEFAULT_INTERVAL = 4


def _interval_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    """Gated delta nets with full attention in every n-th layer (qwen3next, qwen35)."""
    state = LayerCache(state=_mamba_state(shape))
    return tuple(
        state if recurrent else attention_cache(shape, layer)
        for layer, recurrent in enumerate(_recurrent_layers(shape))
    )


def _recurrent_layers(shape: ModelShape) -> tuple[bool, ...]:
    if isinstance(shape.facts.value("attention.recurrent_layers"), tuple):
        stated = shape.facts.per_layer("attention.recurrent_layers", 0)
        return tuple(entry != 0 for entry in stated[: shape.layers])
    interval = shape.number("full_attention_interval", _DEFAULT_INTERVAL) or 1
    return tuple((layer + 1) % interval != 0 for layer in range(shape.layers))


def _mamba_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    return (LayerCache(state=_mamba_state(shape)),) * shape.layers


def _by_heads_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    """A layer without KV heads is recurrent, or has neither where it is only a feed-forward layer."""
    state = _mamba_state(shape)
    feed_forward = shape.facts.per_layer("feed_forward_length", 0)
    pure = shape.architecture.startswith("nemotron_h")
    return tuple(
        attention_cache(shape, layer)
        if shape.kv_heads[layer]
        else LayerCache(state=0 if pure and feed_forward[layer] else state)
        for layer in range(shape.layers)
    )


def _parallel_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    """Attention and recurrence side by side in every layer (falcon-h1)."""
    state = _mamba_state(shape)
    return tuple(attention_cache(shape, layer)._replace(state=state) for layer in range(shape.layers))


def _short_convolution_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    state = shape.embedding * max(0, shape.number("shortconv.l_cache") - 1)
    return tuple(
        attention_cache(shape, layer) if shape.kv_heads[layer] else LayerCache(state=state)
        for layer in range(shape.layers)
    )


def _rwkv_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    shift = shape.number("token_shift_count", 2) * shape.embedding
    state = shift + shape.embedding * shape.number("wkv.head_size", 64)
    return (LayerCache(state=state),) * shape.layers


def _delta_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    """Kimi delta attention: 3 convolutions and a square state per head, latent attention in between."""
    width, heads = shape.number("kda.head_dim"), max(shape.heads)
    convolution = 3 * max(0, shape.number("ssm.conv_kernel") - 1) * heads * width
    state = LayerCache(state=convolution + width * width * heads)
    return tuple(latent_cache(shape, layer) if shape.kv_heads[layer] else state for layer in range(shape.layers))


def _mamba_state(shape: ModelShape) -> int:
    """Convolution and state-space elements of one layer and sequence (n_embd_r + n_embd_s, src/llama-hparams.cpp)."""
    inner, state = shape.number("ssm.inner_size"), shape.number("ssm.state_size")
    convolution = max(0, shape.number("ssm.conv_kernel") - 1) * (inner + 2 * shape.number("ssm.group_count") * state)
    return convolution + state * inner


_DELTA_NET = Family(
    "gated delta net", frozenset({"qwen3next", "qwen35"}), _interval_caches, hybrid=True, host_copies=1.5, pairs=True
)
_SCAN = Family(
    "state space", frozenset({"mamba2"}), _mamba_caches, hybrid=True, scans=True, host_copies=0, pipeline_rows=(9, 18)
)

FAMILIES = (
    _DELTA_NET,
    replace(_DELTA_NET, architectures=frozenset({"qwen35moe"}), extra_rows=1),
    _SCAN,
    replace(_SCAN, architectures=frozenset({"mamba"}), first_scans=True),
    replace(
        _SCAN,
        name="state space and attention",
        architectures=frozenset({"jamba"}),
        layer_caches=_by_heads_caches,
        first_scans=True,
        pairs=True,
    ),
    replace(
        _SCAN,
        name="state space and attention",
        architectures=frozenset({"granitehybrid", "nemotron_h", "nemotron_h_moe", "plamo2"}),
        layer_caches=_by_heads_caches,
    ),
    replace(
        _SCAN,
        name="state space beside attention",
        architectures=frozenset({"falcon-h1"}),
        layer_caches=_parallel_caches,
        pipeline_rows=(0, 0),
    ),
    Family(
        "short convolution",
        frozenset({"lfm2", "lfm2moe"}),
        _short_convolution_caches,
        hybrid=True,
        host_copies=0,
        pipeline_rows=(4, 4),
    ),
    Family(
        "rwkv",
        frozenset({"rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}),
        _rwkv_caches,
        hybrid=True,
        extra_rows=4,
        pipeline_rows=(4, 12),
    ),
    Family("delta attention", frozenset({"kimi-linear"}), _delta_caches, hybrid=True),
)
