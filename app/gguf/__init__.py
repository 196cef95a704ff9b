"""Bytes of a model file → facts, within fixed bounds because the file may be hostile.

The limits are far above every published model and keep memory and time small.
"""

from __future__ import annotations

from app.gguf.facts import ModelFacts, Scalar, TensorInfo
from app.gguf.kind import ENCODERS, Kind, file_pooling, natural_kind, needed_pooling
from app.gguf.projector import read_projector
from app.gguf.shards import read_header
from app.gguf.types import TENSOR_TYPES, TensorType

__all__ = [
    "ENCODERS",
    "TENSOR_TYPES",
    "Kind",
    "ModelFacts",
    "Scalar",
    "TensorInfo",
    "TensorType",
    "file_pooling",
    "natural_kind",
    "needed_pooling",
    "read_header",
    "read_projector",
]
