"""Models of known shape: true metadata and tensor table, to be written with a hole instead of data.

They plan, probe and verify like the real file. Hyperparameters are those of the published models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.gguf_writer import U32, Shape, Tensor

Kind = Callable[[str, int], str]


def uniform(kind: str) -> Kind:
    """Every matrix of one type."""
    return lambda _name, _layer: kind


def q4_k_m(layers: int) -> Kind:
    """What llama-quantize writes as Q4_K_M: Q6_K for V and down matrices of about half of the blocks."""

    def choose(name: str, layer: int) -> str:
        eighth = layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        if name == "output" or (more and name.startswith(("attn_v", "ffn_down"))):
            return "Q6_K"
        return "Q5_K" if name == "attn_qkv" else "Q4_K"

    return choose


_DELTA_KEYS: Mapping[str, Any] = {
    "rope.dimension_count": U32(64),
    "rope.dimension_sections": [11, 11, 10, 0],
    "ssm.conv_kernel": U32(4),
    "ssm.state_size": U32(128),
    "ssm.group_count": U32(16),
    "ssm.time_step_rank": U32(32),
    "ssm.inner_size": U32(4096),
    "full_attention_interval": U32(4),
}


# What llama-quantize takes for rows that are no multiple of 256.
_SHORT_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass
class _Table:
    """Collects rows of a tensor table."""

    kind: Kind
    tensors: list[Tensor] = field(default_factory=list)

    def matrix(self, name: str, *shape: int, layer: int = -1, kind: str | None = None) -> None:
        prefix = "" if layer < 0 else f"blk.{layer}."
        chosen = kind or self.kind(name, layer)
        if shape[0] % 256:
            chosen = _SHORT_ROWS.get(chosen, chosen)
        self.tensors.append(Tensor(f"{prefix}{name}.weight", shape, chosen))

    def vector(self, name: str, *shape: int, layer: int = -1) -> None:
        self.matrix(name, *shape, layer=layer, kind="F32")

    def plain(self, name: str, *shape: int, layer: int) -> None:
        self.tensors.append(Tensor(f"blk.{layer}.{name}", shape, "F32"))


def dense(
    *,
    architecture: str = "llama",
    layers: int = 32,
    embedding: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    head_length: int = 128,
    feed_forward: int = 14336,
    vocabulary: int = 128256,
    context: int = 131072,
    kind: Kind | None = None,
    tied: bool = False,
    keys: Mapping[str, Any] | None = None,
) -> Shape:
    """A dense transformer: llama, qwen2, qwen3 or gemma3."""
    table = _Table(kind or q4_k_m(layers))
    _ends(table, embedding, vocabulary, tied=tied)
    for layer in range(layers):
        _attention(table, layer, architecture, embedding, heads, kv_heads, head_length)
        table.vector("ffn_norm", embedding, layer=layer)
        _feed_forward(table, layer, embedding, feed_forward)
    return Shape(
        architecture,
        _keys(layers, embedding, heads, kv_heads, head_length, context)
        | {"feed_forward_length": U32(feed_forward), **(keys or {})},
        table.tensors,
        vocabulary,
    )


def mixture(
    *,
    architecture: str = "qwen3moe",
    layers: int = 48,
    embedding: int = 2048,
    heads: int = 32,
    kv_heads: int = 4,
    head_length: int = 128,
    experts: int = 128,
    used: int = 8,
    expert_feed_forward: int = 768,
    vocabulary: int = 151936,
    context: int = 40960,
    kind: Kind | None = None,
) -> Shape:
    """A mixture of experts with plain attention: qwen3moe."""
    table = _Table(kind or q4_k_m(layers))
    _ends(table, embedding, vocabulary)
    for layer in range(layers):
        _attention(table, layer, architecture, embedding, heads, kv_heads, head_length)
        table.vector("ffn_norm", embedding, layer=layer)
        _experts(table, layer, embedding, expert_feed_forward, experts)
    keys = _keys(layers, embedding, heads, kv_heads, head_length, context)
    return Shape(architecture, keys | _expert_keys(experts, used, expert_feed_forward), table.tensors, vocabulary)


def qwen35moe(
    *,
    layers: int = 40,
    embedding: int = 2048,
    experts: int = 256,
    expert_feed_forward: int = 512,
    vocabulary: int = 248320,
    kind: Kind | None = None,
    draft_head: bool = False,
) -> Shape:
    """Qwen3.5/3.6-35B-A3B: three gated delta nets to one attention layer, 256 experts and a shared one."""
    table = _Table(kind or q4_k_m(layers))
    _ends(table, embedding, vocabulary)
    blocks = layers + draft_head
    for layer in range(blocks):
        if (layer + 1) % 4 and layer < layers:
            _delta_net(table, layer, embedding)
        else:
            _gated_attention(table, layer, embedding)
        table.vector("post_attention_norm", embedding, layer=layer)
        _experts(table, layer, embedding, expert_feed_forward, experts)
        _shared_expert(table, layer, embedding, expert_feed_forward)
    if draft_head:
        _draft_ends(table, layers, embedding)
    keys = _keys(blocks, embedding, 16, 2, 256, 262144)
    keys |= _expert_keys(experts, 8, expert_feed_forward)
    keys |= {"expert_shared_feed_forward_length": U32(expert_feed_forward), **_DELTA_KEYS}
    if draft_head:
        keys["nextn_predict_layers"] = U32(1)
    return Shape("qwen35moe", keys, table.tensors, vocabulary)


def qwen35(
    *, layers: int = 32, embedding: int = 2560, feed_forward: int = 9216, vocabulary: int = 248320, tied: bool = True
) -> Shape:
    """Qwen3.5-4B: three gated delta nets to one attention layer, dense feed-forward, tied embeddings."""
    table = _Table(q4_k_m(layers))
    _ends(table, embedding, vocabulary, tied=tied)
    for layer in range(layers):
        if (layer + 1) % 4:
            _delta_net(table, layer, embedding)
        else:
            _gated_attention(table, layer, embedding)
        table.vector("post_attention_norm", embedding, layer=layer)
        _feed_forward(table, layer, embedding, feed_forward)
    keys = _keys(layers, embedding, 16, 2, 256, 262144) | dict(_DELTA_KEYS)
    return Shape("qwen35", keys | {"feed_forward_length": U32(feed_forward)}, table.tensors, vocabulary)


def gpt_oss(*, layers: int = 24, experts: int = 32, vocabulary: int = 201088) -> Shape:
    """gpt-oss-20b: windows in every other layer, MXFP4 experts with biases, attention sinks."""
    embedding, heads, kv_heads, head_length, used = 2880, 64, 8, 64, 4
    table = _Table(uniform("Q8_0"))
    _ends(table, embedding, vocabulary)
    for layer in range(layers):
        _attention(table, layer, "gpt-oss", embedding, heads, kv_heads, head_length)
        for name, width in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)):
            table.plain(f"{name}.bias", width * head_length, layer=layer)
        table.plain("attn_output.bias", embedding, layer=layer)
        table.vector("attn_sinks", heads, layer=layer)
        table.vector("post_attention_norm", embedding, layer=layer)
        table.vector("ffn_gate_inp", embedding, experts, layer=layer)
        table.plain("ffn_gate_inp.bias", experts, layer=layer)
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            table.matrix(name, embedding, embedding, experts, layer=layer, kind="MXFP4")
            table.plain(f"{name}.bias", embedding, experts, layer=layer)
    keys = _keys(layers, embedding, heads, kv_heads, head_length, 131072) | _expert_keys(experts, used, embedding)
    return Shape("gpt-oss", keys | {"attention.sliding_window": U32(128)}, table.tensors, vocabulary)


def gemma3(*, layers: int = 34, vocabulary: int = 262144, kind: Kind | None = None) -> Shape:
    """gemma-3-4b: five windows to one full layer, tied embeddings."""
    shape = dense(
        architecture="gemma3",
        layers=layers,
        embedding=2560,
        heads=8,
        kv_heads=4,
        head_length=256,
        feed_forward=10240,
        vocabulary=vocabulary,
        kind=kind,
        tied=True,
        keys={"attention.sliding_window": U32(1024)},
    )
    table = _Table(uniform("F32"), list(shape.tensors))
    for layer in range(layers):
        table.vector("post_attention_norm", 2560, layer=layer)
        table.vector("post_ffw_norm", 2560, layer=layer)
    return Shape(shape.architecture, shape.keys, table.tensors, vocabulary)


def deepseek2(*, layers: int = 27, vocabulary: int = 102400, kind: Kind | None = None) -> Shape:
    """DeepSeek-V2-Lite: latent attention, one dense block in front, 64 experts and shared ones."""
    embedding, heads, latent, rope, nope, experts, width = 2048, 16, 512, 64, 128, 64, 1408
    table = _Table(kind or uniform("Q8_0"))
    _ends(table, embedding, vocabulary)
    for layer in range(layers):
        table.vector("attn_norm", embedding, layer=layer)
        table.matrix("attn_q", embedding, heads * (nope + rope), layer=layer)
        table.matrix("attn_kv_a_mqa", embedding, latent + rope, layer=layer)
        table.vector("attn_kv_a_norm", latent, layer=layer)
        table.matrix("attn_k_b", nope, latent, heads, layer=layer)
        table.matrix("attn_v_b", latent, nope, heads, layer=layer)
        table.matrix("attn_output", heads * nope, embedding, layer=layer)
        table.vector("ffn_norm", embedding, layer=layer)
        if layer == 0:
            _feed_forward(table, layer, embedding, 10944)
            continue
        _experts(table, layer, embedding, width, experts)
        _shared_expert(table, layer, embedding, 2 * width, gated=False)
    keys = _keys(layers, embedding, heads, 1, latent + rope, 163840)
    keys |= _expert_keys(experts, 6, width)
    keys |= {
        "feed_forward_length": U32(10944),
        "leading_dense_block_count": U32(1),
        "expert_shared_count": U32(2),
        "expert_weights_scale": 1.0,
        "attention.kv_lora_rank": U32(latent),
        "attention.value_length": U32(latent),
        "attention.key_length_mla": U32(nope + rope),
        "attention.value_length_mla": U32(nope),
        "rope.dimension_count": U32(rope),
    }
    return Shape("deepseek2", keys, table.tensors, vocabulary)


def glm4moe(*, layers: int = 46, vocabulary: int = 151552, kind: Kind | None = None) -> Shape:
    """GLM-4.5-Air: one dense block in front, 128 experts and a shared one, a draft head at the end."""
    embedding, heads, kv_heads, length, experts, width = 4096, 96, 8, 128, 128, 1408
    table = _Table(kind or q4_k_m(layers))
    _ends(table, embedding, vocabulary)
    for layer in range(layers + 1):
        _attention(table, layer, "glm4moe", embedding, heads, kv_heads, length)
        for name, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)):
            table.plain(f"{name}.bias", count * length, layer=layer)
        table.vector("post_attention_norm", embedding, layer=layer)
        if layer == 0:
            _feed_forward(table, layer, embedding, 10752)
            continue
        _experts(table, layer, embedding, width, experts)
        table.plain("exp_probs_b.bias", experts, layer=layer)
        _shared_expert(table, layer, embedding, width, gated=False)
    _draft_ends(table, layers, embedding)
    keys = _keys(layers + 1, embedding, heads, kv_heads, length, 131072) | _expert_keys(experts, 8, width)
    keys |= {
        "feed_forward_length": U32(10752),
        "rope.dimension_count": U32(64),
        "leading_dense_block_count": U32(1),
        "expert_shared_count": U32(1),
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": U32(2),
        "nextn_predict_layers": U32(1),
    }
    return Shape("glm4moe", keys, table.tensors, vocabulary)


def _keys(layers: int, embedding: int, heads: int, kv_heads: int, head_length: int, context: int) -> dict[str, Any]:
    return {
        "block_count": U32(layers),
        "context_length": U32(context),
        "embedding_length": U32(embedding),
        "attention.head_count": U32(heads),
        "attention.head_count_kv": U32(kv_heads),
        "attention.key_length": U32(head_length),
        "attention.value_length": U32(head_length),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.dimension_count": U32(head_length),
    }


def _expert_keys(experts: int, used: int, width: int) -> dict[str, Any]:
    return {
        "expert_count": U32(experts),
        "expert_used_count": U32(used),
        "expert_feed_forward_length": U32(width),
    }


def _ends(table: _Table, embedding: int, vocabulary: int, *, tied: bool = False) -> None:
    table.matrix("token_embd", embedding, vocabulary)
    table.vector("output_norm", embedding)
    if not tied:
        table.matrix("output", embedding, vocabulary)


def _draft_ends(table: _Table, layer: int, embedding: int) -> None:
    for name in ("enorm", "hnorm", "shared_head_norm"):
        table.vector(f"nextn.{name}", embedding, layer=layer)
    table.matrix("nextn.eh_proj", 2 * embedding, embedding, layer=layer)


def _attention(
    table: _Table, layer: int, architecture: str, embedding: int, heads: int, kv_heads: int, length: int
) -> None:
    table.vector("attn_norm", embedding, layer=layer)
    table.matrix("attn_q", embedding, heads * length, layer=layer)
    table.matrix("attn_k", embedding, kv_heads * length, layer=layer)
    table.matrix("attn_v", embedding, kv_heads * length, layer=layer)
    table.matrix("attn_output", heads * length, embedding, layer=layer)
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        table.vector("attn_q_norm", length, layer=layer)
        table.vector("attn_k_norm", length, layer=layer)
    if architecture == "qwen2":
        for name, width in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)):
            table.plain(f"{name}.bias", width * length, layer=layer)


def _gated_attention(table: _Table, layer: int, embedding: int) -> None:
    table.vector("attn_norm", embedding, layer=layer)
    table.matrix("attn_q", embedding, 8192, layer=layer)
    table.matrix("attn_k", embedding, 512, layer=layer)
    table.matrix("attn_v", embedding, 512, layer=layer)
    table.matrix("attn_output", 4096, embedding, layer=layer)
    table.vector("attn_q_norm", 256, layer=layer)
    table.vector("attn_k_norm", 256, layer=layer)


def _delta_net(table: _Table, layer: int, embedding: int) -> None:
    table.vector("attn_norm", embedding, layer=layer)
    table.matrix("attn_qkv", embedding, 8192, layer=layer)
    table.matrix("attn_gate", embedding, 4096, layer=layer)
    table.vector("ssm_conv1d", 4, 8192, layer=layer)
    table.plain("ssm_dt.bias", 32, layer=layer)
    table.plain("ssm_a", 32, layer=layer)
    table.matrix("ssm_alpha", embedding, 32, layer=layer)
    table.matrix("ssm_beta", embedding, 32, layer=layer)
    table.vector("ssm_norm", 128, layer=layer)
    table.matrix("ssm_out", 4096, embedding, layer=layer)


def _feed_forward(table: _Table, layer: int, embedding: int, width: int) -> None:
    table.matrix("ffn_gate", embedding, width, layer=layer)
    table.matrix("ffn_up", embedding, width, layer=layer)
    table.matrix("ffn_down", width, embedding, layer=layer)


def _experts(table: _Table, layer: int, embedding: int, width: int, experts: int) -> None:
    table.vector("ffn_gate_inp", embedding, experts, layer=layer)
    table.matrix("ffn_gate_exps", embedding, width, experts, layer=layer)
    table.matrix("ffn_up_exps", embedding, width, experts, layer=layer)
    table.matrix("ffn_down_exps", width, embedding, experts, layer=layer)


def _shared_expert(table: _Table, layer: int, embedding: int, width: int, *, gated: bool = True) -> None:
    if gated:
        table.vector("ffn_gate_inp_shexp", embedding, layer=layer)
    table.matrix("ffn_gate_shexp", embedding, width, layer=layer)
    table.matrix("ffn_up_shexp", embedding, width, layer=layer)
    table.matrix("ffn_down_shexp", width, embedding, layer=layer)


def small_mixture() -> Shape:
    """One that a software device can really load: no tensor is over its limit of 128 MiB."""
    return mixture(
        layers=6,
        embedding=256,
        heads=4,
        kv_heads=2,
        head_length=64,
        experts=16,
        used=2,
        expert_feed_forward=1024,
        vocabulary=2000,
        context=1024,
        kind=uniform("F32"),
    )
