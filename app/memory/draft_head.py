"""A draft head (multi-token prediction): the buffers of the graph of its blocks, which have a context of their own.

Fitted on the engine's own accounting of qwen35moe (llama.cpp common/fit.cpp, "extra model"), hence a bound.
"""

from __future__ import annotations

from app.memory.placement import Placement
from app.memory.shape import ModelShape

_F32, _F16 = 4, 2
# Embedding and hidden state, joined and projected, beside attention; its mask is gone before the feed-forward.
_ATTENTION_ROWS = 11
_HOST_ROWS = 2


def head_compute_bytes(shape: ModelShape, placement: Placement, *, expert_copy_bytes: int) -> int:
    """Compute buffer on the device of the head; ``expert_copy_bytes`` is its largest expert tensor left in RAM."""
    q = _F32 * placement.graph_tokens
    attention = _mask_bytes(placement) + _ATTENTION_ROWS * q * shape.embedding
    if not shape.experts:
        return max(attention, q * (4 * shape.embedding + 3 * shape.feed_forward))
    used, rows = shape.experts_used, 1 if expert_copy_bytes else 3
    routed = q * (shape.embedding * (used + 4) + rows * used * shape.expert_feed_forward)
    return max(attention, expert_copy_bytes + routed)


def head_host_bytes(shape: ModelShape, placement: Placement) -> int:
    """Compute buffer of the head in RAM."""
    return _mask_bytes(placement) + _HOST_ROWS * _F32 * placement.graph_tokens * shape.embedding


def _mask_bytes(placement: Placement) -> int:
    return (_F16 if placement.flash_attention else _F32) * placement.graph_tokens * placement.cells
