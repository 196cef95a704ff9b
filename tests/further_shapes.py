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


def qwen3next(*, layers: int = 48, embedding: int = 2048, vocabulary: int = 151936) -> Shape:
    """Qwen3-Next-80B-A3B: as qwen35moe, but 512 experts and one matrix for what has two there."""
    base = shapes.qwen35moe(layers=layers, embedding=embedding, experts=512, vocabulary=vocabulary)
    recurrent = [layer for layer in range(layers) if (layer + 1) % 4]
    joined = [Tensor(f"blk.{layer}.ssm_ba.weight", (embedding, 64), "Q4_K") for layer in recurrent]
    keys = {**base.keys, "expert_used_count": U32(10)}
    return Shape("qwen3next", keys, [*_without(base, "ssm_alpha", "ssm_beta"), *joined], vocabulary)


def gemma3n(*, layers: int = 35, embedding: int = 2048, vocabulary: int = 262144) -> Shape:
    """gemma-3n-E4B: an embedding for each layer, four streams, and caches that later layers share."""
    base = shapes.dense(
        architecture="gemma3",
        layers=layers,
        embedding=embedding,
        heads=8,
        kv_heads=2,
        head_length=256,
        feed_forward=16384,
        vocabulary=vocabulary,
        context=32768,
        tied=True,
        keys={
            "attention.sliding_window": U32(512),
            "attention.shared_kv_layers": U32(15),
            "embedding_length_per_layer_input": U32(256),
            "altup.num_inputs": U32(4),
            "altup.active_idx": U32(0),
        },
    )
    ends = [
        Tensor("per_layer_token_embd.weight", (256 * layers, vocabulary), "Q8_0"),
        Tensor("per_layer_model_proj.weight", (embedding, 256 * layers), "F16"),
        Tensor("per_layer_proj_norm.weight", (256,), "F32"),
        *(Tensor(f"altup_{name}.weight", (embedding, embedding, 3), "F16") for name in ("proj", "unembd_proj")),
    ]
    sizes = {
        "post_attention_norm": (embedding,), "post_ffw_norm": (embedding,), "post_norm": (embedding,),
        "inp_gate": (embedding, 256), "proj": (256, embedding), "altup_correct_coef": (4, 4),
        "altup_correct_scale": (embedding,), "altup_predict_coef": (4, 16), "altup_router": (embedding, 4),
        "altup_router_norm": (embedding,), "laurel_l": (embedding, 64), "laurel_r": (64, embedding),
        "laurel_post_norm": (embedding,),
    }  # fmt: skip
    added = [
        Tensor(f"blk.{layer}.{name}.weight", size, "F32") for layer in range(layers) for name, size in sizes.items()
    ]
    return Shape("gemma3n", base.keys, [*base.tensors, *ends, *added], vocabulary)
