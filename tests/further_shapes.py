"""Models of known shape that are variations of others: fused matrices, parallel blocks, chunked attention."""

from __future__ import annotations

from typing import Any

from tests import shapes
from tests.gguf_writer import U32, Shape, Tensor


def gemma2(*, layers: int = 26, vocabulary: int = 256000) -> Shape:
    """gemma-2-2b: a window in every other layer."""
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
        Tensor(f"blk.{layer}.{name}.weight", (2304,), "F32")
        for layer in range(layers)
        for name in ("post_attention_norm", "post_ffw_norm")
    ]
    return Shape(shape.architecture, shape.keys, [*shape.tensors, *norms], vocabulary)


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


def gemma4(*, layers: int = 42, embedding: int = 2560, vocabulary: int = 262144) -> Shape:
    """gemma-4-E4B: an embedding for each layer, wider heads where there is no window, caches that layers share."""
    is_full = [layer % 6 == 5 for layer in range(layers)]
    tensors = [
        Tensor("token_embd.weight", (embedding, vocabulary), "Q4_K"),
        Tensor("output_norm.weight", (embedding,), "F32"),
        Tensor("rope_freqs.weight", (256,), "F32"),
        Tensor("per_layer_token_embd.weight", (256 * layers, vocabulary), "Q8_0"),
        Tensor("per_layer_model_proj.weight", (embedding, 256 * layers), "F16"),
        Tensor("per_layer_proj_norm.weight", (256,), "F32"),
    ]
    for layer in range(layers):
        tensors += _gemma4_block(layer, embedding, 512 if is_full[layer] else 256, kv_heads=2, feed_forward=10240)
        tensors += [
            Tensor(f"blk.{layer}.inp_gate.weight", (embedding, 256), "F32"),
            Tensor(f"blk.{layer}.proj.weight", (256, embedding), "F32"),
            Tensor(f"blk.{layer}.post_norm.weight", (embedding,), "F32"),
        ]
    keys = _gemma4_keys(layers, embedding, 8, is_full, 512) | {
        "feed_forward_length": U32(10240),
        "attention.head_count_kv": U32(2),
        "attention.shared_kv_layers": U32(18),
        "embedding_length_per_layer_input": U32(256),
    }
    return Shape("gemma4", keys, tensors, vocabulary)


def gemma4_mixture(*, layers: int = 30, embedding: int = 2816, vocabulary: int = 262144) -> Shape:
    """gemma-4-26B-A4B: 128 experts beside a dense feed-forward, V as K where there is no window."""
    is_full, width, experts = [layer % 6 == 5 for layer in range(layers)], 704, 128
    tensors = [
        Tensor("token_embd.weight", (embedding, vocabulary), "Q4_K"),
        Tensor("output_norm.weight", (embedding,), "F32"),
        Tensor("rope_freqs.weight", (256,), "F32"),
    ]
    for layer in range(layers):
        length, kv_heads = (512, 2) if is_full[layer] else (256, 8)
        block = _gemma4_block(layer, embedding, length, kv_heads=kv_heads, feed_forward=2112, heads=16)
        tensors += [part for part in block if not (is_full[layer] and "attn_v." in part.name)]
        tensors += [
            Tensor(f"blk.{layer}.ffn_gate_inp.weight", (embedding, experts), "F32"),
            Tensor(f"blk.{layer}.ffn_gate_inp.scale", (embedding,), "F32"),
            Tensor(f"blk.{layer}.ffn_gate_up_exps.weight", (embedding, 2 * width, experts), "Q4_K"),
            Tensor(f"blk.{layer}.ffn_down_exps.weight", (width, embedding, experts), "Q5_0"),
            Tensor(f"blk.{layer}.ffn_down_exps.scale", (experts,), "F32"),
            *(
                Tensor(f"blk.{layer}.{name}.weight", (embedding,), "F32")
                for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
            ),
        ]
    keys = _gemma4_keys(layers, embedding, 16, is_full, 1024) | {
        "feed_forward_length": U32(2112),
        "attention.head_count_kv": [2 if full else 8 for full in is_full],
        "embedding_length_per_layer_input": U32(0),
        "expert_count": U32(experts),
        "expert_used_count": U32(8),
        "expert_feed_forward_length": U32(width),
    }
    return Shape("gemma4", keys, tensors, vocabulary)


def _gemma4_block(
    layer: int, embedding: int, length: int, *, kv_heads: int, feed_forward: int, heads: int = 8
) -> list[Tensor]:
    matrices = {
        "attn_q": (embedding, heads * length), "attn_k": (embedding, kv_heads * length),
        "attn_v": (embedding, kv_heads * length), "attn_output": (heads * length, embedding),
        "ffn_gate": (embedding, feed_forward), "ffn_up": (embedding, feed_forward),
        "ffn_down": (feed_forward, embedding),
    }  # fmt: skip
    norms = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), embedding)
    norms |= {"attn_q_norm": length, "attn_k_norm": length, "layer_output_scale": 1}
    return [
        *(
            Tensor(f"blk.{layer}.{name}.weight", size, "Q5_0" if size[0] % 256 else "Q4_K")
            for name, size in matrices.items()
        ),
        *(Tensor(f"blk.{layer}.{name}.weight", (width,), "F32") for name, width in norms.items()),
    ]


def _gemma4_keys(layers: int, embedding: int, heads: int, is_full: list[bool], window: int) -> dict[str, Any]:
    return {
        "block_count": U32(layers),
        "context_length": U32(131072),
        "embedding_length": U32(embedding),
        "attention.head_count": U32(heads),
        "attention.key_length": U32(512),
        "attention.value_length": U32(512),
        "attention.key_length_swa": U32(256),
        "attention.value_length_swa": U32(256),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": U32(window),
        "attention.sliding_window_pattern": [not full for full in is_full],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": U32(512),
        "rope.dimension_count_swa": U32(256),
        "final_logit_softcapping": 30.0,
    }
