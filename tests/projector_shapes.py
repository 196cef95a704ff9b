"""Projectors of known shape, to be written with a hole instead of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gguf_writer import U32, Shape, Tensor


def siglip(
    *, blocks: int = 27, width: int = 1152, feed_forward: int = 4304, text_width: int = 2560, image: int = 896
) -> Shape:
    """That of gemma-3-4b: pictures of 896 by 896 pixels, whatever theirs are."""
    tensors = [
        _matrix("v.patch_embd", 14, 14, 3, width),
        _vector("v.patch_embd.bias", width),
        Tensor("v.position_embd.weight", (width, (image // 14) ** 2), "F32"),
    ]
    for block in range(blocks):
        names = [(f"v.blk.{block}.{name}", width, width) for name in ("attn_q", "attn_k", "attn_v", "attn_out")]
        tensors += _block(block, width, feed_forward, names)
    tensors += [_vector("v.post_ln.weight", width), _vector("v.post_ln.bias", width)]
    tensors += [_matrix("mm.input_projection", text_width, width), _vector("mm.soft_emb_norm.weight", width)]
    keys = _keys("gemma3", blocks, width, feed_forward, text_width, image, patch=14)
    return Shape("clip", keys, tensors, 0)


def qwen3vl(*, blocks: int = 27, width: int = 1152, feed_forward: int = 4304, text_width: int = 2560) -> Shape:
    """That of Qwen3-VL and Qwen3.5: pictures of any size, four patches to a token."""
    tensors = [
        _matrix("v.patch_embd", 16, 16, 3, width),
        Tensor("v.patch_embd.weight.1", (16, 16, 3, width), "F16"),
        _vector("v.patch_embd.bias", width),
        Tensor("v.position_embd.weight", (width, 2304), "F32"),
    ]
    for block in range(blocks):
        names = [(f"v.blk.{block}.attn_qkv", width, 3 * width), (f"v.blk.{block}.attn_out", width, width)]
        tensors += _block(block, width, feed_forward, names)
    tensors += [_vector("v.post_ln.weight", width), _vector("v.post_ln.bias", width)]
    for name, outer in (("mm.0", 4 * width), ("mm.2", text_width)):
        tensors += [_matrix(name, 4 * width, outer), _vector(f"{name}.bias", outer)]
    keys = _keys("qwen3vl_merger", blocks, width, feed_forward, text_width, 768, patch=16)
    keys |= {"vision.spatial_merge_size": U32(2), "vision.is_deepstack_layers": [False] * blocks}
    return Shape("clip", keys, tensors, 0)


def _block(block: int, width: int, feed_forward: int, attention: list[tuple[str, int, int]]) -> list[Tensor]:
    tensors = []
    prefix = f"v.blk.{block}."
    both = [*attention, (f"{prefix}ffn_up", width, feed_forward), (f"{prefix}ffn_down", feed_forward, width)]
    for name, inner, outer in both:
        tensors += [_matrix(name, inner, outer), _vector(f"{name}.bias", outer)]
    for norm in ("ln1", "ln2"):
        tensors += [_vector(f"{prefix}{norm}.weight", width), _vector(f"{prefix}{norm}.bias", width)]
    return tensors


def _keys(
    kind: str, blocks: int, width: int, feed_forward: int, text_width: int, image: int, *, patch: int
) -> dict[str, Any]:
    keys: Mapping[str, Any] = {
        "has_vision_encoder": True,
        "projector_type": kind,
        "use_gelu": True,
        "vision.image_size": U32(image),
        "vision.patch_size": U32(patch),
        "vision.embedding_length": U32(width),
        "vision.feed_forward_length": U32(feed_forward),
        "vision.projection_dim": U32(text_width),
        "vision.block_count": U32(blocks),
        "vision.attention.head_count": U32(16),
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
    }
    return dict(keys)


def _matrix(name: str, *shape: int) -> Tensor:
    return Tensor(f"{name}.weight", shape, "F16")


def _vector(name: str, width: int) -> Tensor:
    return Tensor(name, (width,), "F32")
