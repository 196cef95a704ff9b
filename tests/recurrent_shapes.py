"""Models of known shape whose layers keep a state instead of a cache, all or some of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests import shapes
from tests.gguf_writer import U32, Shape, Tensor

_KIND = "Q4_K"


class _Scan(NamedTuple):
    """A state-space layer: its width, states, heads and groups."""

    inner: int
    states: int
    heads: int
    groups: int = 1

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.groups * self.states

    def keys(self) -> dict[str, Any]:
        return {
            "ssm.conv_kernel": U32(4),
            "ssm.inner_size": U32(self.inner),
            "ssm.state_size": U32(self.states),
            "ssm.time_step_rank": U32(self.heads),
            "ssm.group_count": U32(self.groups),
        }


def mamba2(*, layers: int = 48, embedding: int = 2048, vocabulary: int = 50288) -> Shape:
    """mamba2-1.3b: nothing but state-space layers, tied embeddings."""
    scan = _Scan(2 * embedding, 128, 64)
    tensors = _ends(embedding, vocabulary)
    for layer in range(layers):
        tensors += _scan(layer, embedding, scan)
    keys = {
        "block_count": U32(layers),
        "context_length": U32(1 << 20),
        "embedding_length": U32(embedding),
        "attention.head_count": U32(0),
        "feed_forward_length": U32(0),
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    return Shape("mamba2", keys | scan.keys(), tensors, vocabulary)


def granitehybrid(*, layers: int = 40, embedding: int = 2048, vocabulary: int = 100352) -> Shape:
    """granite-4.0-h: a state-space layer nine times in ten, attention in the tenth, a feed-forward in each."""
    scan = _Scan(2 * embedding, 128, 64)
    tensors = _ends(embedding, vocabulary)
    kv_heads = [8 if layer % 10 == 5 else 0 for layer in range(layers)]
    for layer in range(layers):
        tensors += _attention(layer, embedding, 32, 8, 64) if kv_heads[layer] else _scan(layer, embedding, scan)
        tensors += _feed_forward(layer, embedding, 8192)
    keys = _keys(layers, embedding, 32, 64, 8192) | scan.keys()
    keys |= {
        "attention.head_count_kv": kv_heads,
        "attention.scale": 0.0078,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 8.0,
    }
    return Shape("granitehybrid", keys, tensors, vocabulary)


def falcon_h1(*, layers: int = 24, embedding: int = 2048, vocabulary: int = 65536) -> Shape:
    """Falcon-H1-1.5B: attention and a state-space scan side by side in every layer."""
    scan = _Scan(3072, 256, 48)
    tensors = _ends(embedding, vocabulary, tied=False)
    for layer in range(layers):
        tensors += _scan(layer, embedding, scan) + _attention(layer, embedding, 8, 2, 128)[1:]
        # The engine's name for this one has no ".weight".
        tensors += [
            Tensor(f"blk.{layer}.ffn_norm", part.shape, part.type) if "ffn_norm" in part.name else part
            for part in _feed_forward(layer, embedding, 4096)
        ]
    keys = _keys(layers, embedding, 8, 128, 4096) | scan.keys()
    return Shape("falcon-h1", keys | {"attention.head_count_kv": U32(2)}, tensors, vocabulary)


def lfm2(*, layers: int = 16, embedding: int = 2048, vocabulary: int = 65536) -> Shape:
    """LFM2-1.2B: short convolutions, attention in six of sixteen layers."""
    tensors = _ends(embedding, vocabulary, norm="token_embd_norm")
    kv_heads = [8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(layers)]
    for layer in range(layers):
        if kv_heads[layer]:
            tensors += _attention(layer, embedding, 32, 8, 64)
            tensors += [_vector(layer, f"attn_{name}_norm.weight", 64) for name in "qk"]
        else:
            tensors += [
                _vector(layer, "attn_norm.weight", embedding),
                Tensor(f"blk.{layer}.shortconv.conv.weight", (3, embedding), "F32"),
                _matrix(layer, "shortconv.in_proj", embedding, 3 * embedding),
                _matrix(layer, "shortconv.out_proj", embedding, embedding),
            ]
        tensors += _feed_forward(layer, embedding, 8192)
    keys = _keys(layers, embedding, 32, 64, 8192)
    keys |= {"shortconv.l_cache": U32(3), "attention.head_count_kv": kv_heads}
    return Shape("lfm2", keys, tensors, vocabulary)


def gemma2(*, layers: int = 26, vocabulary: int = 256000) -> Shape:
    """gemma-2-2b: a window in every other layer; no state, but it shares nothing else with the other shapes."""
    shape = shapes.dense(
        architecture="gemma2",
        layers=layers,
        embedding=2304,
        heads=8,
        kv_heads=4,
        head_length=256,
        feed_forward=9216,
        vocabulary=vocabulary,
        context=8192,
        tied=True,
        keys={
            "attention.sliding_window": U32(4096),
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    )
    norms = [
        _vector(layer, f"{name}.weight", 2304)
        for layer in range(layers)
        for name in ("post_attention_norm", "post_ffw_norm")
    ]
    return Shape(shape.architecture, shape.keys, [*shape.tensors, *norms], vocabulary)


def _keys(layers: int, embedding: int, heads: int, head_length: int, feed_forward: int) -> dict[str, Any]:
    return {
        "block_count": U32(layers),
        "context_length": U32(131072),
        "embedding_length": U32(embedding),
        "feed_forward_length": U32(feed_forward),
        "attention.head_count": U32(heads),
        "attention.key_length": U32(head_length),
        "attention.value_length": U32(head_length),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.dimension_count": U32(head_length),
    }


def _ends(embedding: int, vocabulary: int, *, tied: bool = True, norm: str = "output_norm") -> list[Tensor]:
    ends = [Tensor("token_embd.weight", (embedding, vocabulary), _KIND), Tensor(f"{norm}.weight", (embedding,), "F32")]
    return ends if tied else [*ends, Tensor("output.weight", (embedding, vocabulary), _KIND)]


def _scan(layer: int, embedding: int, scan: _Scan) -> list[Tensor]:
    return [
        _vector(layer, "attn_norm.weight", embedding),
        _matrix(layer, "ssm_in", embedding, scan.inner + scan.convolved + scan.heads),
        Tensor(f"blk.{layer}.ssm_conv1d.weight", (4, scan.convolved), "F32"),
        _vector(layer, "ssm_conv1d.bias", scan.convolved),
        _vector(layer, "ssm_dt.bias", scan.heads),
        Tensor(f"blk.{layer}.ssm_a", (1, scan.heads), "F32"),
        Tensor(f"blk.{layer}.ssm_d", (1, scan.heads), "F32"),
        Tensor(f"blk.{layer}.ssm_norm.weight", (scan.inner // scan.groups, scan.groups), "F32"),
        _matrix(layer, "ssm_out", scan.inner, embedding),
    ]


def _attention(layer: int, embedding: int, heads: int, kv_heads: int, length: int) -> list[Tensor]:
    return [
        _vector(layer, "attn_norm.weight", embedding),
        _matrix(layer, "attn_q", embedding, heads * length),
        _matrix(layer, "attn_k", embedding, kv_heads * length),
        _matrix(layer, "attn_v", embedding, kv_heads * length),
        _matrix(layer, "attn_output", heads * length, embedding),
    ]


def _feed_forward(layer: int, embedding: int, width: int) -> list[Tensor]:
    return [
        _vector(layer, "ffn_norm.weight", embedding),
        _matrix(layer, "ffn_gate", embedding, width),
        _matrix(layer, "ffn_up", embedding, width),
        _matrix(layer, "ffn_down", width, embedding),
    ]


def _matrix(layer: int, name: str, *shape: int) -> Tensor:
    return Tensor(f"blk.{layer}.{name}.weight", shape, _KIND)


def _vector(layer: int, name: str, width: int) -> Tensor:
    return Tensor(f"blk.{layer}.{name}", (width,), "F32")
