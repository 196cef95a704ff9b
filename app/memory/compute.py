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
_F32 = 4
_F16 = 2
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GraphTerms:
    """What the bound depends on besides the model's dimensions.

    ``cells`` is the sum over the kinds of cache (full and windowed) of cells of one slot. With large batches the engine
    computes what lies in RAM on the device too, and copies it there: ``expert_copy_bytes`` is the largest expert tensor
    left in RAM, ``expert_pair_bytes`` those of a hybrid's first attention layer and of the recurrent one before it if
    both are in RAM, ``tensor_copy_bytes`` and ``cache_copy_bytes`` the largest other tensor and the largest cache of
    whole layers in RAM; each is 0 when there are none. ``alone`` says that no device takes part.
    """

    cells: int
    expert_copy_bytes: int = 0
    tensor_copy_bytes: int = 0
    cache_copy_bytes: int = 0
    expert_pair_bytes: int = 0
    alone: bool = False

    @property
    def has_host_layers(self) -> bool:
        """Whether whole layers are in RAM, not only experts."""
        return self.tensor_copy_bytes > 0


def device_compute_bytes(shape: ModelShape, family: Family, placement: Placement, terms: GraphTerms) -> int:
    """Compute buffer of a device that holds layers."""
    q = _F32 * placement.graph_tokens
    graph = _dense_graph(shape, terms, q)
    if shape.experts:
        routed = _routed_graph(shape, family, terms, q)
        graph = max(graph, routed) if shape.number("leading_dense_block_count") else routed
    graph = max(graph, _score_bytes(shape, placement, terms))
    return _mask_bytes(placement, terms) + graph + _logits_bytes(shape, family, placement)


def host_compute_bytes(shape: ModelShape, family: Family, placement: Placement, terms: GraphTerms) -> int:
    """Compute and output buffers in RAM."""
    if terms.alone:
        rows = _dense_rows(shape)
        if shape.experts:
            rows = max(rows, _routed_rows(shape, family, rows=family.expert_rows))
        rows += 0 if family.hybrid else shape.embedding
    else:
        rows = shape.embedding * (_HYBRID_ROWS if family.hybrid and terms.has_host_layers else _HOST_ROWS)
    output = _F32 * shape.vocabulary * placement.parallel
    logits = _logits_bytes(shape, family, placement) + output if terms.alone else output
    graph = _F32 * placement.graph_tokens * rows
    if terms.alone:
        graph = max(graph, _score_bytes(shape, placement, terms))
    return _mask_bytes(placement, terms) + graph + logits


def _logits_bytes(shape: ModelShape, family: Family, placement: Placement) -> int:
    """Logits of one token per slot, or of every token for embeddings; an encoder has no vocabulary to choose from."""
    if not family.causal:
        return 0
    return _F32 * shape.vocabulary * (placement.graph_tokens if placement.embedding else placement.parallel)


def _dense_graph(shape: ModelShape, terms: GraphTerms, q: int) -> int:
    """Attention and feed-forward; layers in RAM add copies that share the space of the activations in part."""
    activations = q * _dense_rows(shape)
    if not terms.has_host_layers:
        return activations
    return max(
        activations + q * shape.feed_forward,
        activations + terms.cache_copy_bytes,
        terms.tensor_copy_bytes + terms.cache_copy_bytes + 4 * q * shape.embedding,
    )


def _routed_graph(shape: ModelShape, family: Family, terms: GraphTerms, q: int) -> int:
    """A mixture's layers; experts in RAM add one copy, in a hybrid two where recurrent layers meet attention."""
    copy = terms.expert_copy_bytes
    alone = q * _routed_rows(shape, family, rows=family.expert_rows)
    if not copy:
        return alone
    if terms.has_host_layers:
        return copy + q * _routed_rows(shape, family, rows=2) + terms.cache_copy_bytes
    if terms.expert_pair_bytes:
        return max(copy + alone, terms.expert_pair_bytes + _HYBRID_ROWS * q * shape.embedding)
    return max(alone, copy + q * _routed_rows(shape, family, rows=1))


def _dense_rows(shape: ModelShape) -> int:
    return 4 * shape.embedding + 3 * shape.feed_forward


def _routed_rows(shape: ModelShape, family: Family, *, rows: int) -> int:
    used = shape.experts_used
    return shape.embedding * (used + 4 + family.extra_rows) + rows * used * shape.expert_feed_forward


def _mask_bytes(placement: Placement, terms: GraphTerms) -> int:
    """The attention mask: f16 for flash attention, else f32."""
    return (_F16 if placement.flash_attention else _F32) * placement.graph_tokens * terms.cells


def _score_bytes(shape: ModelShape, placement: Placement, terms: GraphTerms) -> int:
    """Without flash attention: the scores of every head beside the attention's own rows, but not beside the rest.

    From a GiB on the allocator no longer places the softmax over the scores.
    """
    if placement.flash_attention:
        return 0
    scores = _F32 * placement.graph_tokens * terms.cells * max(shape.heads)
    return scores * (2 if scores >= _GIB else 1) + _HYBRID_ROWS * _F32 * placement.graph_tokens * shape.embedding
