"""Models of known shape that are variations of others: fused matrices, parallel blocks, chunked attention."""

from __future__ import annotations

from tests import shapes
from tests.gguf_writer import U32, Shape, Tensor


def phi3(*, layers: int = 32, embedding: int = 3072, feed_forward: int = 8192, vocabulary: int = 32064) -> Shape:
    """Phi-3-mini: Q, K and V in one matrix, gate and up in another, as many K as Q heads."""
    base = shapes.dense(
        architecture="phi3",
        layers=layers,
        embedding=embedding,
        heads=32,
        kv_heads=32,
        head_length=96,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        keys={"rope.scaling.original_context_length": U32(4096), "attention.sliding_window": U32(262144)},
    )
    fused = [
        Tensor(f"blk.{layer}.{name}.weight", (embedding, width), "Q4_K")
        for layer in range(layers)
        for name, width in (("attn_qkv", 3 * embedding), ("ffn_up", 2 * feed_forward))
    ]
    return Shape("phi3", base.keys, [*_without(base, "attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"), *fused],
                 vocabulary)  # fmt: skip


def cohere2(*, layers: int = 32, vocabulary: int = 256000) -> Shape:
    """command-r7b: attention and feed-forward side by side, three windows to one full layer, tied embeddings."""
    base = shapes.dense(
        architecture="cohere2",
        layers=layers,
        vocabulary=vocabulary,
        tied=True,
        keys={
            "attention.sliding_window": U32(4096),
            "attention.layer_norm_epsilon": 1e-5,
            "logit_scale": 0.25,
        },
    )
    return Shape("cohere2", base.keys, _without(base, "ffn_norm"), vocabulary)


def llama4(*, layers: int = 48, embedding: int = 5120, vocabulary: int = 202048) -> Shape:
    """Llama-4-Scout: 16 experts and a shared one, chunks of 8,192 tokens in three of four layers."""
    base = shapes.mixture(
        architecture="llama4",
        layers=layers,
        embedding=embedding,
        heads=40,
        kv_heads=8,
        experts=16,
        used=1,
        expert_feed_forward=8192,
        vocabulary=vocabulary,
        context=10485760,
    )
    shared = [
        Tensor(f"blk.{layer}.ffn_{name}_shexp.weight", size, "Q4_K")
        for layer in range(layers)
        for name, size in (("gate", (embedding, 8192)), ("up", (embedding, 8192)), ("down", (8192, embedding)))
    ]
    keys = {**base.keys, "interleave_moe_layer_step": U32(1), "feed_forward_length": U32(16384)}
    return Shape("llama4", keys, [*base.tensors, *shared], vocabulary)


def _without(shape: Shape, *names: str) -> list[Tensor]:
    return [tensor for tensor in shape.tensors if not tensor.name.endswith(tuple(f".{name}.weight" for name in names))]
