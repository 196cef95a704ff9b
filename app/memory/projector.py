"""The projector of a multimodal model: its weights and the graph of its largest image."""

from __future__ import annotations

from app.gguf import ModelFacts

_F32 = 4
_LEAST_GRAPH_BYTES = 64 << 20
_MOST_GRAPH_BYTES = 2 << 30
_DEFAULT_IMAGE, _DEFAULT_PATCH = 336, 14


def projector_bytes(mmproj: ModelFacts) -> int:
    """Weights plus a bound of the encoder's graph; the engine measures the latter itself before it loads."""
    return sum(tensor.size_bytes for tensor in mmproj.tensors) + _graph_bytes(mmproj)


def _graph_bytes(mmproj: ModelFacts) -> int:
    image = mmproj.integer("vision.image_size", _DEFAULT_IMAGE)
    patch = max(1, mmproj.integer("vision.patch_size", _DEFAULT_PATCH))
    patches = (image // patch) ** 2
    width = mmproj.integer("vision.embedding_length", 1024)
    hidden = mmproj.integer("vision.feed_forward_length", 4 * width)
    heads = mmproj.integer("vision.attention.head_count", 16)
    graph = _F32 * patches * (6 * width + 2 * hidden + heads * patches)
    return min(max(graph, _LEAST_GRAPH_BYTES), _MOST_GRAPH_BYTES)
