"""Models of known shape whose layers keep a state instead of a cache, all or some of them."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        tensors += _short_convolution(layer, embedding) if not kv_heads[layer] else _normed_attention(layer, embedding)
        tensors += _feed_forward(layer, embedding, 8192)
    keys = _keys(layers, embedding, 32, 64, 8192)
    keys |= {"shortconv.l_cache": U32(3), "attention.head_count_kv": kv_heads}
    return Shape("lfm2", keys, tensors, vocabulary)


def jamba(*, layers: int = 16, embedding: int = 4096, vocabulary: int = 65536) -> Shape:
    """Half a Jamba-mini: scans of the first generation, attention in every eighth layer, experts in every other."""
    inner, states, rank = 2 * embedding, 16, 256
    tensors = _ends(embedding, vocabulary, tied=False)
    kv_heads = [8 if layer % 8 == 4 else 0 for layer in range(layers)]
    for layer in range(layers):
        if kv_heads[layer]:
            tensors += _attention(layer, embedding, 32, 8, 128)
        else:
            tensors += _first_scan(layer, embedding, inner, states, rank)
            norms = {"dt": rank, "b": states, "c": states}
            tensors += [_vector(layer, f"ssm_{name}_norm.weight", size) for name, size in norms.items()]
        experts = [part for part in _experts(layer, embedding, 14336, 16) if "exp_probs_b" not in part.name]
        tensors += experts if layer % 2 else _feed_forward(layer, embedding, 14336)
    keys = _keys(layers, embedding, 32, 128, 14336)
    keys |= {
        "attention.head_count_kv": kv_heads,
        "ssm.conv_kernel": U32(4),
        "ssm.inner_size": U32(inner),
        "ssm.state_size": U32(states),
        "ssm.time_step_rank": U32(rank),
        "expert_count": U32(16),
        "expert_used_count": U32(2),
    }
    return Shape("jamba", keys, tensors, vocabulary)


def nemotron_h(*, layers: int = 56, embedding: int = 4608, vocabulary: int = 131072) -> Shape:
    """Nemotron-Nano-9B-v2 with rows of full blocks: each layer is a scan, attention (four), or a feed-forward."""
    scan = _Scan(10240, 128, 128, 8)
    attention = (14, 21, 30, 39)
    tensors = _ends(embedding, vocabulary, tied=False)
    is_scan = [layer not in attention and layer % 2 == 0 for layer in range(layers)]
    for layer in range(layers):
        if layer in attention:
            tensors += _attention(layer, embedding, 40, 8, 128)
        elif is_scan[layer]:
            tensors += _scan(layer, embedding, scan)
        else:
            tensors += [
                _vector(layer, "attn_norm.weight", embedding),
                _matrix(layer, "ffn_up", embedding, 15872),
                _matrix(layer, "ffn_down", 15872, embedding),
            ]
    keys = _keys(layers, embedding, 40, 128, 0) | scan.keys()
    keys |= {
        "attention.head_count_kv": [8 if layer in attention else 0 for layer in range(layers)],
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": [0 if layer in attention or is_scan[layer] else 15872 for layer in range(layers)],
    }
    return Shape("nemotron_h", keys, tensors, vocabulary)


def rwkv7(*, layers: int = 24, embedding: int = 2048, vocabulary: int = 65536) -> Shape:
    """RWKV-7 World 1.5B: no attention at all, a matrix of state for each head."""
    tensors = _ends(embedding, vocabulary, tied=False)
    tensors += [Tensor(f"{name}.bias", (embedding,), "F32") for name in ("output_norm", "token_embd_norm")]
    tensors += [Tensor("token_embd_norm.weight", (embedding,), "F32")]
    for layer in range(layers):
        tensors += _rwkv7_layer(layer, embedding)
    keys = _keys(layers, embedding, 0, 0, 4 * embedding)
    keys |= {
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": U32(64),
        "token_shift_count": U32(2),
        "attention.decay_lora_rank": U32(96),
        "attention.iclr_lora_rank": U32(96),
        "attention.value_residual_mix_lora_rank": U32(64),
        "attention.gate_lora_rank": U32(256),
    }
    return Shape("rwkv7", keys, tensors, vocabulary)


def lfm2moe(*, layers: int = 24, embedding: int = 2048, vocabulary: int = 65536) -> Shape:
    """LFM2-8B-A1B: short convolutions, attention in a quarter of the layers, 32 experts behind two dense blocks."""
    tensors = _ends(embedding, vocabulary, norm="token_embd_norm")
    kv_heads = [8 if layer in (2, 6, 10, 14, 18, 21) else 0 for layer in range(layers)]
    for layer in range(layers):
        tensors += _short_convolution(layer, embedding) if not kv_heads[layer] else _normed_attention(layer, embedding)
        tensors += _feed_forward(layer, embedding, 7168) if layer < 2 else _experts(layer, embedding, 1792, 32)
    keys = _keys(layers, embedding, 32, 64, 7168) | _expert_keys(32, 4, 1792)
    keys |= {
        "shortconv.l_cache": U32(3),
        "attention.head_count_kv": kv_heads,
        "leading_dense_block_count": U32(2),
    }
    return Shape("lfm2moe", keys, tensors, vocabulary)


def nemotron_h_moe(*, embedding: int = 2816, vocabulary: int = 131072) -> Shape:
    """Nemotron-3-Nano-30B-A3B with rows of full blocks: a scan, attention, or 128 experts without a gate."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    scan, width, layers = _Scan(4096, 128, 64, 8), 1792, len(pattern)
    tensors = _ends(embedding, vocabulary, tied=False)
    for layer, kind in enumerate(pattern):
        if kind == "M":
            tensors += _scan(layer, embedding, scan)
        elif kind == "*":
            tensors += _attention(layer, embedding, 32, 2, 128)
        else:
            tensors += [
                _vector(layer, "attn_norm.weight", embedding),
                *(part for part in _experts(layer, embedding, width, 128)[1:] if "gate_exps" not in part.name),
                _matrix(layer, "ffn_up_shexp", embedding, 2 * width),
                _matrix(layer, "ffn_down_shexp", 2 * width, embedding),
            ]
    keys = _keys(layers, embedding, 32, 128, 0) | scan.keys() | _expert_keys(128, 6, width)
    keys |= {
        "attention.head_count_kv": [2 if kind == "*" else 0 for kind in pattern],
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": [width if kind == "E" else 0 for kind in pattern],
        "expert_shared_count": U32(1),
        "expert_shared_feed_forward_length": U32(2 * width),
    }
    return Shape("nemotron_h_moe", keys, tensors, vocabulary)


def kimi_linear(*, layers: int = 27, embedding: int = 2304, vocabulary: int = 163840) -> Shape:
    """Kimi-Linear-48B-A3B: delta attention, latent attention in every fourth layer, 256 experts and a shared one."""
    heads, length, latent, rope, width = 32, 128, 512, 64, 1024
    is_full = [(layer + 1) % 4 == 0 or layer == layers - 1 for layer in range(layers)]
    tensors = _ends(embedding, vocabulary, tied=False)
    for layer in range(layers):
        tensors += [_vector(layer, "attn_norm.weight", embedding)]
        tensors += _latent(layer, embedding) if is_full[layer] else _delta(layer, embedding, heads, length)
        tensors += [_matrix(layer, "attn_output", heads * length, embedding)]
        if not layer:
            tensors += _feed_forward(layer, embedding, 9216)
            continue
        tensors += _experts(layer, embedding, width, 256)
        tensors += [_matrix(layer, f"ffn_{name}_shexp", embedding, width) for name in ("gate", "up")]
        tensors += [_matrix(layer, "ffn_down_shexp", width, embedding)]
    keys = _keys(layers, embedding, heads, latent + rope, 9216) | _expert_keys(256, 8, width)
    keys |= {
        "attention.head_count_kv": [int(full) for full in is_full],
        "attention.value_length": U32(latent),
        "attention.kv_lora_rank": U32(latent),
        "attention.key_length_mla": U32(length + rope),
        "attention.value_length_mla": U32(length),
        "rope.dimension_count": U32(rope),
        "ssm.conv_kernel": U32(4),
        "kda.head_dim": U32(length),
        "expert_shared_count": U32(1),
        "leading_dense_block_count": U32(1),
    }
    return Shape("kimi-linear", keys, tensors, vocabulary)


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


def _first_scan(layer: int, embedding: int, inner: int, states: int, rank: int) -> list[Tensor]:
    return [
        _vector(layer, "attn_norm.weight", embedding),
        _matrix(layer, "ssm_in", embedding, 2 * inner),
        Tensor(f"blk.{layer}.ssm_conv1d.weight", (4, inner), "F32"),
        _vector(layer, "ssm_conv1d.bias", inner),
        _matrix(layer, "ssm_x", inner, rank + 2 * states),
        _matrix(layer, "ssm_dt", rank, inner),
        _vector(layer, "ssm_dt.bias", inner),
        Tensor(f"blk.{layer}.ssm_a", (states, inner), "F32"),
        _vector(layer, "ssm_d", inner),
        _matrix(layer, "ssm_out", inner, embedding),
    ]


def _short_convolution(layer: int, embedding: int) -> list[Tensor]:
    return [
        _vector(layer, "attn_norm.weight", embedding),
        Tensor(f"blk.{layer}.shortconv.conv.weight", (3, embedding), "F32"),
        _matrix(layer, "shortconv.in_proj", embedding, 3 * embedding),
        _matrix(layer, "shortconv.out_proj", embedding, embedding),
    ]


def _normed_attention(layer: int, embedding: int) -> list[Tensor]:
    norms = [_vector(layer, f"attn_{name}_norm.weight", 64) for name in "qk"]
    return [*_attention(layer, embedding, 32, 8, 64), *norms]


def _delta(layer: int, embedding: int, heads: int, length: int) -> list[Tensor]:
    width = heads * length
    return [
        *(_matrix(layer, f"attn_{name}", embedding, width) for name in "qkv"),
        *(Tensor(f"blk.{layer}.ssm_conv1d_{name}.weight", (4, 1, width), "F32") for name in "qkv"),
        *(_matrix(layer, f"ssm_{name}_a", embedding, length) for name in "fg"),
        *(Tensor(f"blk.{layer}.ssm_{name}_b.weight", (length, width), "F16") for name in "fg"),
        _matrix(layer, "ssm_beta", embedding, heads),
        Tensor(f"blk.{layer}.ssm_a", (1, heads), "F32"),
        _vector(layer, "ssm_dt.bias", width),
        _vector(layer, "ssm_norm.weight", length),
    ]


def _latent(layer: int, embedding: int) -> list[Tensor]:
    heads, length, latent, rope = 32, 128, 512, 64
    return [
        _matrix(layer, "attn_q", embedding, heads * (length + rope)),
        _matrix(layer, "attn_kv_a_mqa", embedding, latent + rope),
        _vector(layer, "attn_kv_a_norm.weight", latent),
        Tensor(f"blk.{layer}.attn_k_b.weight", (length, latent, heads), "Q8_0"),
        _matrix(layer, "attn_v_b", latent, length, heads),
    ]


def _experts(layer: int, embedding: int, width: int, count: int) -> list[Tensor]:
    return [
        _vector(layer, "ffn_norm.weight", embedding),
        Tensor(f"blk.{layer}.ffn_gate_inp.weight", (embedding, count), "F32"),
        _vector(layer, "exp_probs_b.bias", count),
        *(_matrix(layer, f"ffn_{name}_exps", embedding, width, count) for name in ("gate", "up")),
        _matrix(layer, "ffn_down_exps", width, embedding, count),
    ]


def _expert_keys(count: int, used: int, width: int) -> dict[str, Any]:
    return {
        "expert_count": U32(count),
        "expert_used_count": U32(used),
        "expert_feed_forward_length": U32(width),
        "expert_gating_func": U32(2),
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }


def _rwkv7_layer(layer: int, embedding: int) -> list[Tensor]:
    vectors = ("attn_norm.weight", "attn_norm.bias", "attn_norm_2.weight", "attn_norm_2.bias", "time_mix_w0.weight",
               "time_mix_a0.weight", "time_mix_v0.weight", "time_mix_k_k.weight", "time_mix_k_a.weight",
               "time_mix_ln.weight", "time_mix_ln.bias",
               "channel_mix_lerp_k.weight", "time_mix_r_k.weight")  # fmt: skip
    ranks = {"w": 96, "a": 96, "v": 64 if layer else 96, "g": 256}
    tensors = [_vector(layer, name, embedding) for name in vectors]
    for name, rank in ranks.items():
        tensors += [
            Tensor(f"blk.{layer}.time_mix_{name}1.weight", (embedding, rank), "F16"),
            Tensor(f"blk.{layer}.time_mix_{name}2.weight", (rank, embedding), "F16"),
        ]
    tensors += [Tensor(f"blk.{layer}.time_mix_lerp_fused.weight", (embedding, 1, 1, 6), "F32")]
    tensors += [_matrix(layer, f"time_mix_{name}", embedding, embedding) for name in ("key", "value", "receptance")]
    return [
        *tensors,
        _matrix(layer, "time_mix_output", embedding, embedding),
        _matrix(layer, "channel_mix_key", embedding, 4 * embedding),
        _matrix(layer, "channel_mix_value", 4 * embedding, embedding),
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
