"""Where the parts of a model go and how large the engine makes its caches: everything a ledger depends on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.gguf import TENSOR_TYPES

CELL_PADDING = 256
"""llama.cpp rounds the cells of a KV cache up to this (GGML_PAD in src/llama-context.cpp)."""


class KVType(StrEnum):
    """Element types that the engine takes for ``--cache-type-k`` and ``--cache-type-v``."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    IQ4_NL = "iq4_nl"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"

    @property
    def block(self) -> int:
        """Elements of a block; a row of the cache must be a multiple of it."""
        return _BLOCKS[self.value][0]

    @property
    def quantised(self) -> bool:
        """Whether elements share a scale; a quantised V needs flash attention."""
        return self.block > 1

    @property
    def bytes_per_element(self) -> float:
        """Mean bytes of an element, for estimates and messages."""
        block, size = _BLOCKS[self.value]
        return size / block

    def row_bytes(self, elements: int) -> int:
        """Bytes of one row of the cache (ggml_row_size)."""
        block, size = _BLOCKS[self.value]
        return -(-elements // block) * size


_BLOCKS = {kind.name.lower(): (kind.block, kind.size) for kind in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class Placement:
    """Every setting that decides how much memory a model takes, and where.

    ``gpu_layers`` counts the output layer (all = blocks + 1); ``tensor_split`` has one share per device, empty for one
    device; ``context_per_request`` is in tokens; ``mmproj_on`` is a device's name, ``host``, or None without projector;
    ``embedding`` makes the engine reserve an output for every token of a batch. ``draft_tokens`` are guessed ahead (0:
    none), by the model's own head with ``draft_head``, else by a draft model on the device ``draft_on`` or ``host``.
    ``moe_cache_mib`` is what the one device keeps of experts that are in RAM.
    """

    gpu_layers: int
    cpu_moe_layers: int
    tensor_split: tuple[float, ...]
    kv_cache_k: KVType
    kv_cache_v: KVType
    flash_attention: bool
    context_per_request: int
    parallel: int
    batch: int
    ubatch: int
    threads: int
    load_mode: str
    cache_ram_mib: int
    context_checkpoints: int
    mmproj_on: str | None
    embedding: bool = False
    draft_on: str | None = None
    draft_head: bool = False
    draft_tokens: int = 0
    moe_cache_mib: int = 0

    @property
    def cells(self) -> int:
        """Cells of one slot's cache: slots never share theirs (``--no-kv-unified``)."""
        return padded(self.context_per_request)

    @property
    def graph_tokens(self) -> int:
        """Tokens of the largest graph that the engine reserves memory for."""
        return min(self.ubatch, self.batch, self.cells * self.parallel)


def padded(cells: int) -> int:
    """``cells`` rounded up as the engine does."""
    return -(-cells // CELL_PADDING) * CELL_PADDING
