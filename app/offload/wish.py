"""What the operator asks for, in the user's units."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Wish:
    """Intentions; None leaves a choice to the planner, anything else is kept exactly or refused.

    ``context`` is in tokens for each request, prompt and answer together; ``allow_smaller_context`` lets it shrink
    after an engine ran out of memory, never before. With ``embedding`` every text is computed at once; ``pooling`` is
    how its vectors become one (``rank``: a relevance), None what the file says.
    """

    context: int | None = None
    parallel: int = 1
    kv_cache: str = "auto"
    gpu_layers: int | None = None
    cpu_moe_layers: int | None = None
    vram_reserve_bytes: int = 512 * _MIB
    ram_reserve_bytes: int = 2048 * _MIB
    embedding: bool = False
    pooling: str | None = None
    require_gpu: bool = False
    draft_head: bool = False
    # The engine can keep some of the experts in RAM on the device.
    moe_cache: bool = False
    allow_smaller_context: bool = False
