"""The projector of a multimodal model: its weights and the graph of its largest image.

The graph is fitted on the engine's own worst case (llama.cpp tools/mtmd/mtmd.cpp), which it also says before it loads.
"""

from __future__ import annotations

from app.gguf import ModelFacts

_F32 = 4
_MIB = 1 << 20
_LEAST_GRAPH_BYTES = 16 * _MIB
_MOST_GRAPH_BYTES = 2048 * _MIB
_DEFAULT_IMAGE, _DEFAULT_PATCH = 336, 14
# The picture that the engine tries an encoder of any size with: 46 by 46 tokens of 2 by 2 patches.
_ANY_SIZE_PATCHES = 4 * 46 * 46
_CHANNELS = 3
# Elements of one patch besides its rows, and what does not grow with the picture.
_FIXED_SIZE_REST, _FIXED_SIZE_BYTES = 2810, 6 * _MIB


def projector_bytes(mmproj: ModelFacts) -> int:
    """Weights plus what encoding takes; a bound, which the engine corrects when it is asked."""
    return sum(tensor.size_bytes for tensor in mmproj.tensors) + _graph_bytes(mmproj)


def _graph_bytes(mmproj: ModelFacts) -> int:
    any_size = mmproj.integer("vision.spatial_merge_size", 1) > 1
    graph = _any_size_graph_bytes(mmproj) if any_size else _fixed_size_graph_bytes(mmproj)
    return min(max(graph, _LEAST_GRAPH_BYTES), _MOST_GRAPH_BYTES)


def _any_size_graph_bytes(mmproj: ModelFacts) -> int:
    """Qwen's encoders: the wider of attention (six rows and the picture twice) and feed-forward."""
    width, hidden, patch = _dimensions(mmproj)
    row = _F32 * _ANY_SIZE_PATCHES
    picture = row * _CHANNELS * patch**2
    return max(6 * row * width + 2 * picture, row * (hidden + 3 * width) + picture // 2)


def _fixed_size_graph_bytes(mmproj: ModelFacts) -> int:
    width, hidden, patch = _dimensions(mmproj)
    patches = (mmproj.integer("vision.image_size", _DEFAULT_IMAGE) // patch) ** 2
    return _F32 * patches * (hidden + 2 * width + _FIXED_SIZE_REST) + _FIXED_SIZE_BYTES


def _dimensions(mmproj: ModelFacts) -> tuple[int, int, int]:
    width = mmproj.integer("vision.embedding_length", 1024)
    hidden = mmproj.integer("vision.feed_forward_length", 4 * width)
    return width, hidden, max(1, mmproj.integer("vision.patch_size", _DEFAULT_PATCH))
