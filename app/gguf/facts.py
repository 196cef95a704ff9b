"""What a model file says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from app.errors import ModelFileError
from app.gguf.problems import damaged
from app.gguf.types import FILE_TYPES

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table; ``offset`` counts from the start of its file's data section."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    size_bytes: int

    @property
    def elements(self) -> int:
        """The product of the dimensions."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of one model say about it; ``path`` is the first shard of a split model."""

    path: Path
    shards: tuple[Path, ...]
    file_bytes: int
    metadata: Mapping[str, Value]
    array_lengths: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        """``general.architecture``, the prefix of the model's own keys."""
        return self._text("general.architecture") or ""

    @property
    def name(self) -> str:
        """The model's own name, else that of its file."""
        return self._text("general.name") or self.path.stem

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def layers(self) -> int:
        """Blocks in the file, draft-head blocks included."""
        return self.integer("block_count", 0)

    @property
    def layers_next(self) -> int:
        """Blocks of a draft head (multi-token prediction) at the end of the stack."""
        return self.integer("nextn_predict_layers", 0)

    @property
    def experts(self) -> int:
        """Experts of a layer, 0 in a dense model."""
        return self.integer("expert_count", 0)

    @property
    def context_trained(self) -> int:
        """The context in tokens that the model was trained for, 0 when the file does not say."""
        return self.integer("context_length", 0)

    @property
    def vocabulary_size(self) -> int:
        """Words of the tokenizer, else what the model claims, else 0."""
        return self.array_lengths.get("tokenizer.ggml.tokens", 0) or self.integer("vocab_size", 0)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of a chat, if there is one."""
        return self._text("tokenizer.chat_template")

    @property
    def quantisation(self) -> str | None:
        """The mixture the file was written with, such as ``Q4_K_M``."""
        number = self.metadata.get("general.file_type")
        return FILE_TYPES.get(number & 0x3FF) if isinstance(number, int) and number >= 0 else None

    def value(self, key: str) -> Value | None:
        """The value of ``{architecture}.{key}``."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int) -> int:
        """``{architecture}.{key}`` as an integer; of a per-layer array the largest entry. Raises ModelFileError."""
        value = self.value(key)
        if value is None:
            return default
        entries = value if isinstance(value, tuple) else (value,)
        numbers = [entry for entry in entries if isinstance(entry, int)]
        if len(numbers) != len(entries) or not numbers:
            raise self.wrong(key, "is not an integer")
        return max(numbers)

    def per_layer(self, key: str, default: int) -> tuple[int, ...]:
        """``{architecture}.{key}`` for each block: a scalar holds for all. Raises ModelFileError."""
        value = self.value(key)
        if not isinstance(value, tuple):
            return (self.integer(key, default),) * self.layers
        numbers = tuple(int(entry) for entry in value if isinstance(entry, int))
        if len(numbers) != len(value) or len(numbers) < self.layers:
            raise self.wrong(key, f"has {len(numbers)} integers for {self.layers} blocks")
        return numbers[: self.layers]

    def wrong(self, key: str, problem: str) -> ModelFileError:
        """The error for a key whose value cannot be right."""
        return damaged(self.path, f"its key {self.architecture}.{key} {problem}")

    def _text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) and value else None
