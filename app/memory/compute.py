"""The compute buffer: what the graph of one ubatch needs, as an upper bound.

Fitted on the engine's own reservations of some fifty configurations, hence a bound and not a derivation
(llama.cpp src/llama-context.cpp sched_reserve). Units: q is one f32 element for each token of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.memory.families import Family
from app.memory.placement import Placement
from app.memory.shape import ModelShape

_HOST_ROWS = 4
_HYBRID_ROWS = 6
_EARLY_LAYERS = 3
_F32 = 4
_F16 = 2


@dataclass(frozen=True, slots=True)
class GraphTerms:
    """What the bound depends on besides the model's dimensions.

    ``cells`` is the sum over the kinds of cache (full and windowed) of cells of one slot; ``largest_expert_bytes`` is
    the largest expert tensor left in RAM, 0 when all are on the device; ``early_experts_in_ram`` says whether more than
    the first of them is; ``alone`` means that no device takes part.
    """

    cells: int
    largest_expert_bytes: int
    early_experts_in_ram: bool
    has_host_layers: bool
    alone: bool


def device_compute_bytes(shape: ModelShape, family: Family, placement: Placement, terms: GraphTerms) -> int:
    """Compute buffer of a device that holds layers."""
    q = _F32 * placement.graph_tokens
    copies, activations = 0, q * _dense_rows(shape)
    if shape.experts:
        copies = terms.largest_expert_bytes
        routed = q * _expert_rows(shape, family, rows=1 if copies else family.expert_rows)
        if copies and family.hybrid and terms.early_experts_in_ram:
            copies *= 2
            routed = max(routed, _HYBRID_ROWS * q * shape.embedding)
        activations = max(activations if _has_dense_blocks(shape) else 0, routed)
    return _mask_bytes(shape, placement, terms) + copies + activations + output_bytes(shape, placement)


def host_compute_bytes(shape: ModelShape, family: Family, placement: Placement, terms: GraphTerms) -> int:
    """Compute and output buffers in RAM."""
    q = _F32 * placement.graph_tokens
    if terms.alone:
        rows = max(_dense_rows(shape), _expert_rows(shape, family, rows=family.expert_rows) if shape.experts else 0)
    else:
        rows = shape.embedding * (_HYBRID_ROWS if family.hybrid and terms.has_host_layers else _HOST_ROWS)
    logits = output_bytes(shape, placement) * (2 if terms.alone else 1)
    return _mask_bytes(shape, placement, terms) + q * rows + logits


def output_bytes(shape: ModelShape, placement: Placement) -> int:
    """Logits of one token per slot."""
    return _F32 * shape.vocabulary * placement.parallel


def _dense_rows(shape: ModelShape) -> int:
    return 4 * shape.embedding + 3 * shape.feed_forward


def _expert_rows(shape: ModelShape, family: Family, *, rows: int) -> int:
    used = shape.experts_used
    embedding = shape.embedding * (used + 4 + family.extra_rows)
    return embedding + rows * used * shape.expert_feed_forward


def _has_dense_blocks(shape: ModelShape) -> bool:
    return shape.number("leading_dense_block_count") > 0


def _mask_bytes(shape: ModelShape, placement: Placement, terms: GraphTerms) -> int:
    """The attention mask in f16; without flash attention also the f32 scores of every head."""
    per_cell = _F16 if placement.flash_attention else _F16 + _F32 * max(shape.heads)
    return per_cell * placement.graph_tokens * terms.cells
