"""Writes GGUF files whose data is a hole: 20 GB apparent, a few kB or MB on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import pack
from typing import Any

from app.gguf import TENSOR_TYPES

TYPES = {kind.name: number for number, kind in TENSOR_TYPES.items()}
ALIGNMENT = 32


@dataclass(frozen=True)
class Tensor:
    """A row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def size_bytes(self) -> int:
        kind = TENSOR_TYPES[TYPES[self.type]]
        elements = 1
        for dimension in self.shape:
            elements *= dimension
        return elements // kind.block * kind.size


@dataclass(frozen=True)
class Shape:
    """A model to write; ``keys`` get the architecture's prefix."""

    architecture: str
    keys: Mapping[str, Any]
    tensors: Sequence[Tensor]
    vocabulary: int
    metadata: Mapping[str, Any] = field(default_factory=dict)


class U32(int):
    """An integer that is written as 32 bits, as the engine wants its hyperparameters."""


def write(path: Path, shape: Shape, *, words: bool = False, extra: Mapping[str, Any] | None = None) -> Path:
    """Write ``shape``; ``words`` adds a vocabulary of that size with merges, else it has none."""
    metadata: dict[str, Any] = {"general.architecture": shape.architecture, "general.name": path.stem}
    metadata |= {f"{shape.architecture}.{key}": value for key, value in shape.keys.items()}
    metadata |= _tokenizer(shape.vocabulary) if words else {"tokenizer.ggml.model": "none"}
    metadata[f"{shape.architecture}.vocab_size"] = U32(shape.vocabulary)
    metadata |= {**shape.metadata, **(extra or {})}
    head = header(metadata, shape.tensors)
    data_bytes = sum(padded(tensor.size_bytes) for tensor in shape.tensors)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        file.truncate(file.tell() + data_bytes)
    return path


def header(metadata: Mapping[str, Any], tensors: Sequence[Tensor], *, version: int = 3) -> bytes:
    """The bytes before the data section, without padding."""
    parts = [b"GGUF", pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [text(key) + value(item) for key, item in metadata.items()]
    offset = 0
    for tensor in tensors:
        dimensions = pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts.append(text(tensor.name) + dimensions + pack("<IQ", TYPES[tensor.type], offset))
        offset += padded(tensor.size_bytes)
    return b"".join(parts)


def text(string: str) -> bytes:
    """A GGUF string."""
    raw = string.encode()
    return pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A GGUF value with its type number in front."""
    if isinstance(item, list):
        return pack("<I", 9) + _array(item)
    number, raw = _scalar(item)
    return pack("<I", number) + raw


def padded(size_bytes: int) -> int:
    """The space of a tensor in the file."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _array(items: list[Any]) -> bytes:
    scalars = [_scalar(item) for item in items]
    number = scalars[0][0] if scalars else 8
    return pack("<IQ", number, len(items)) + b"".join(raw for _, raw in scalars)


def _scalar(item: Any) -> tuple[int, bytes]:
    if isinstance(item, bool):
        return 7, pack("<?", item)
    if isinstance(item, U32):
        return 4, pack("<I", item)
    if isinstance(item, int):
        return 5, pack("<i", item)
    if isinstance(item, float):
        return 6, pack("<f", item)
    return 8, text(item)


def _tokenizer(count: int) -> dict[str, Any]:
    words = [f"w{number:x}" for number in range(count)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * count,
        "tokenizer.ggml.merges": [f"{word} {word}" for word in words],
        "tokenizer.ggml.eos_token_id": U32(0),
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
