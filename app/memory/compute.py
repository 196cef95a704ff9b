"""The compute buffer: what the graph of one ubatch needs, as an upper bound.

Fitted on the engine's own reservations of some hundred configurations (the table in tests/bench/README.md), hence a
bound and not a derivation (llama.cpp src/llama-context.cpp sched_reserve); the engine's own word is the last one.
Units: q is one f32 element for each token of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.memory.families import Family
from app.memory.placement import Placement
from app.memory.shape import ModelShape

_HOST_ROWS = 4
_HYBRID_ROWS = 6
# Residual, query, key, value and the attention's result are alive beside the copies of a cache.
_ATTENTION_ROWS, _ROUTED_ATTENTION_ROWS, _HYBRID_ATTENTION_ROWS = 5, 9, 10
_HYBRID_HOST_ROWS = 3
_REUSED_SHARE = 0.7
# Embedding rows that the copies between pipelined devices take on the first, on each other, and in RAM.
_FIRST_PIPELINE_ROWS, _NEXT_PIPELINE_ROWS, _HOST_PIPELINE_ROWS = 12, 7, 6
# Rows of a scan in RAM: into it and out of it, four copies of each, nearly as many on the device as there are in RAM.
_HOST_HANDED_ROWS, _DEVICE_HANDED_ROWS = 8, 3.5
# Between layers that RAM computes and those of the device.
_HAND_OVER_ROWS = 2
_F32 = 4
_F16 = 2
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GraphTerms:
    """What the bound depends on besides the model's dimensions.

    ``cells`` is the sum over the kinds of cache (full and windowed) of cells of one slot. With large batches the engine
    computes what lies in RAM on the device too, and copies it there: ``expert_copy_bytes`` is the largest expert tensor
    left in RAM, ``expert_pair_bytes`` those that are copied at once where a family does so (see ``Family``);
    ``tensor_copy_bytes``, ``down_copy_bytes`` and ``cache_copy_bytes`` are the largest tensor besides
    the down matrices, the largest of those, and the largest cache of whole layers in RAM; each is 0 when there are
    none. ``state_bytes`` is the largest state of one layer, all
    slots, ``recurrent_layers`` how many have one. ``alone`` says that no device takes part,
    ``is_pipelined`` that several devices hold everything: then the engine keeps four copies of what goes from one to
    the next, so that they work on several ubatches at once; ``has_host_layers`` that whole layers are in RAM, not only
    experts.
    """

    cells: int
    expert_copy_bytes: int = 0
    tensor_copy_bytes: int = 0
    down_copy_bytes: int = 0
    cache_copy_bytes: int = 0
    expert_pair_bytes: int = 0
    state_bytes: int = 0
    recurrent_layers: int = 0
    alone: bool = False
    is_pipelined: bool = False
    has_host_layers: bool = False


def device_compute_bytes(
    shape: ModelShape, family: Family, placement: Placement, terms: GraphTerms, *, is_first: bool = True
) -> int:
    """Compute buffer of a device that holds layers; ``is_first`` when the first block is among them."""
    q = _F32 * placement.graph_tokens
    graph = _dense_graph(shape, family, terms, q)
    if shape.experts:
        routed = _routed_graph(shape, family, terms, q)
        graph = max(graph, routed) if shape.number("leading_dense_block_count") else routed
    graph = max(graph, _score_bytes(shape, placement, terms), q * _scan_rows(shape, family))
    rows = _FIRST_PIPELINE_ROWS if is_first else _NEXT_PIPELINE_ROWS
    rows += family.pipeline_rows[0 if is_first else 1]
    pipeline = _pipeline_bytes(shape, placement, terms, rows=rows)
    pipeline += round(_DEVICE_HANDED_ROWS * _handed_over_bytes(shape, family, placement, terms))
    if (terms.has_host_layers and not family.host_copies) or family.first_scans:
        graph += _HAND_OVER_ROWS * q * shape.embedding
    state = terms.state_bytes if family.scans else 0
    return _mask_bytes(placement, terms) + graph + _logits_bytes(shape, family, placement) + pipeline + state


def host_compute_bytes(shape: ModelShape, family: Family, placement: Placement, terms: GraphTerms) -> int:
    """Compute and output buffers in RAM."""
    if terms.alone:
        rows = _dense_rows(shape, family)
        if shape.experts:
            rows = max(rows, _chosen_rows(shape, family))
        rows += 0 if family.hybrid else shape.embedding
    else:
        rows = shape.embedding * (_HYBRID_ROWS if family.hybrid and terms.has_host_layers else _HOST_ROWS)
        rows += _layer_input_rows(shape)
    output = _F32 * shape.vocabulary * placement.parallel
    logits = _logits_bytes(shape, family, placement) + output if terms.alone else output
    if terms.alone or terms.has_host_layers:
        rows = max(rows, _scan_rows(shape, family))
    graph = _F32 * placement.graph_tokens * rows
    if terms.alone:
        graph = max(graph, _score_bytes(shape, placement, terms))
    pipeline = _pipeline_bytes(shape, placement, terms, rows=_HOST_PIPELINE_ROWS)
    pipeline += _HOST_HANDED_ROWS * _handed_over_bytes(shape, family, placement, terms)
    return _mask_bytes(placement, terms) + graph + logits + pipeline


def _pipeline_bytes(shape: ModelShape, placement: Placement, terms: GraphTerms, *, rows: int) -> int:
    """Three more copies of the mask and of what else is handed on."""
    if not terms.is_pipelined:
        return 0
    return 3 * _mask_bytes(placement, terms) + _F32 * placement.graph_tokens * rows * shape.embedding


def _handed_over_bytes(shape: ModelShape, family: Family, placement: Placement, terms: GraphTerms) -> int:
    """One row for each scan that RAM computes between pipelined devices, as it does those of the first generation."""
    if not family.first_scans or not terms.is_pipelined:
        return 0
    return _F32 * placement.graph_tokens * terms.recurrent_layers * shape.number("ssm.inner_size")


def _logits_bytes(shape: ModelShape, family: Family, placement: Placement) -> int:
    """Logits of one token per slot, or of every token for embeddings; an encoder has no vocabulary to choose from."""
    if not family.causal:
        return 0
    return _F32 * shape.vocabulary * (placement.graph_tokens if placement.embedding else placement.parallel)


def _dense_graph(shape: ModelShape, family: Family, terms: GraphTerms, q: int) -> int:
    """Attention and feed-forward; layers in RAM are computed on the device too, from copies of weights and caches."""
    activations = q * _dense_rows(shape, family)
    if not terms.tensor_copy_bytes:
        return activations
    rows = _HYBRID_HOST_ROWS if family.hybrid else 1
    return max(
        activations + terms.tensor_copy_bytes + rows * q * shape.embedding,
        terms.down_copy_bytes + q * (shape.feed_forward + 4 * shape.embedding),
        terms.cache_copy_bytes + (_HYBRID_ATTENTION_ROWS if family.hybrid else _ATTENTION_ROWS) * q * shape.embedding,
    )


def _routed_graph(shape: ModelShape, family: Family, terms: GraphTerms, q: int) -> int:
    """A mixture's layers; experts in RAM add one copy, or two where a family needs them at once."""
    copy = terms.expert_copy_bytes
    alone = q * _chosen_rows(shape, family)
    if not copy:
        return alone
    graph = max(alone, copy + q * _routed_rows(shape, family, rows=1))
    if terms.tensor_copy_bytes:
        # A copy of experts takes the place of the copied cache before it, where that was clearly large enough.
        beside = terms.cache_copy_bytes if copy > _REUSED_SHARE * terms.cache_copy_bytes else 0
        graph = max(
            graph,
            copy + q * _routed_rows(shape, family, rows=2) + beside,
            terms.cache_copy_bytes + _ROUTED_ATTENTION_ROWS * q * shape.embedding,
        )
    if terms.expert_pair_bytes:
        beside = q * _routed_rows(shape, family, rows=2) if family.whole_experts else alone
        graph = max(graph, copy + beside, terms.expert_pair_bytes + _HYBRID_ROWS * q * shape.embedding)
    return graph


def _dense_rows(shape: ModelShape, family: Family) -> int:
    extra = 0 if shape.experts else family.extra_rows
    return (4 + extra) * shape.embedding + 3 * shape.feed_forward + 2 * _layer_input_rows(shape)


def _layer_input_rows(shape: ModelShape) -> int:
    """What gemma3n and gemma4 look up for each layer besides the embedding: looked up in RAM, and scaled."""
    return shape.layers * shape.number("embedding_length_per_layer_input")


def _chosen_rows(shape: ModelShape, family: Family) -> int:
    """Where all experts of a layer are at hand.

    Their gate and up rows are free again when the down matrix is multiplied. Where its result is no wider than both it
    takes their place, else it lies behind them. Not with a scan, whose rows lie between, nor in llama4, which weighs
    what goes into an expert instead of what comes out.
    """
    takes_their_place = shape.embedding <= 2 * shape.expert_feed_forward and not (family.scans or family.chunks)
    apart = shape.experts_used * shape.embedding if takes_their_place else 0
    return _routed_rows(shape, family, rows=3) - apart


def _routed_rows(shape: ModelShape, family: Family, *, rows: int) -> int:
    used = shape.experts_used
    return shape.embedding * (used + 4 + family.extra_rows) + rows * used * shape.expert_feed_forward


def _scan_rows(shape: ModelShape, family: Family) -> int:
    """A state-space layer: its projection, the convolution's rows, and what the scan reads and writes."""
    if not family.scans:
        return 0
    inner, states = shape.number("ssm.inner_size"), shape.number("ssm.group_count") * shape.number("ssm.state_size")
    return 4 * shape.embedding + 5 * inner + 4 * states + shape.number("ssm.time_step_rank")


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
