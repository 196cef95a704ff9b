"""Small models that really run: a known shape filled with random numbers of a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from app.gguf import TENSOR_TYPES, TensorInfo, read_header
from tests.gguf_writer import Shape, write

_SEED = 7
_NORMAL, _CONTROL = 1, 3


def write_random(path: Path, shape: Shape, *, specials: Sequence[str] = ()) -> Path:
    """Write ``shape``, whose tensors are F32 or F16, with a vocabulary that ends with ``specials``, and weights.

    Norms are one and the output is wide, so that the likeliest word stays so whatever a device rounds.
    """
    plain = shape.vocabulary - len(specials)
    kinds = [_NORMAL] * plain + [_CONTROL] * len(specials)
    extra = {"tokenizer.ggml.tokens": [*_vocabulary(plain), *specials], "tokenizer.ggml.token_type": kinds}
    write(path, shape, words=True, extra=extra)
    generator = np.random.default_rng(_SEED)
    facts = read_header(path)
    data_bytes = max(tensor.offset + -(-tensor.size_bytes // 32) * 32 for tensor in facts.tensors)
    with path.open("r+b") as file:
        for tensor in facts.tensors:
            file.seek(facts.file_bytes - data_bytes + tensor.offset)
            file.write(_values(tensor, generator))
    return path


def _vocabulary(count: int) -> list[str]:
    """An end of text, the 256 bytes as GPT-2 writes them, and words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]
    return ["<end>", *characters, *(f"word{number}" for number in range(count - 257))]


def _values(tensor: TensorInfo, generator: np.random.Generator) -> bytes:
    kind = np.dtype("<f4" if TENSOR_TYPES[tensor.type].name == "F32" else "<f2")
    if len(tensor.shape) == 1 and tensor.name.endswith("norm.weight"):
        return np.ones(tensor.elements, kind).tobytes()
    width = 1.0 if tensor.name == "output.weight" else tensor.shape[0] ** -0.5
    return generator.normal(0, width, tensor.elements).astype(kind).tobytes()
