"""RAM is a budget too: what must be there, and how large the caches may grow in the rest."""

from __future__ import annotations

from dataclasses import replace

from app.errors import DoesNotFit
from app.memory import MemoryLedger, MemoryModel, Placement
from app.offload.plan import mib

PROCESS_BYTES = 384 << 20
"""The engine process itself: code, tokenizer, HTTP server and allocator, besides its buffers."""

_MIB = 1 << 20
_GIB = 1 << 30
_MOST_CACHE_MIB = 4096
_LEAST_CACHE_MIB = 64
_MOST_CHECKPOINTS = 8
_PINNED_ROOM_BYTES = 6 * _GIB


def fit_caches(model: MemoryModel, placement: Placement, ledger: MemoryLedger, *, budget_bytes: int) -> Placement:
    """``placement`` with load mode, prompt cache and checkpoints that stay within the RAM budget.

    Raises DoesNotFit with the numbers when what must be in RAM exceeds it.
    """
    left = budget_bytes - PROCESS_BYTES - ledger.host.needed_bytes
    if left < 0:
        raise _refusal(model, placement, needed_bytes=budget_bytes - left, budget_bytes=budget_bytes)
    if placement.embedding or not model.family.causal:
        return placement
    checkpoints = _checkpoints(model, placement, room_bytes=left // 4)
    left -= checkpoints * model.checkpoint_bytes(placement) * placement.parallel
    cache_mib = min(left // 2 // _MIB // _LEAST_CACHE_MIB * _LEAST_CACHE_MIB, _MOST_CACHE_MIB)
    return replace(
        placement,
        context_checkpoints=checkpoints,
        cache_ram_mib=cache_mib,
        load_mode=_load_mode(placement, ledger, left_bytes=left - cache_mib * _MIB),
    )


def fits_ram(ledger: MemoryLedger, *, budget_bytes: int) -> bool:
    """Whether RAM holds what the model cannot run without."""
    return ledger.host.needed_bytes + PROCESS_BYTES <= budget_bytes


def _checkpoints(model: MemoryModel, placement: Placement, *, room_bytes: int) -> int:
    """Checkpoints per slot; plain attention needs none because its cache can be cut anywhere."""
    each = model.checkpoint_bytes(placement) * placement.parallel
    return min(_MOST_CHECKPOINTS, room_bytes // each) if each else 0


def _load_mode(placement: Placement, ledger: MemoryLedger, *, left_bytes: int) -> str:
    """Experts in RAM are copied to the device for long prompts: pinned memory doubles that, if there is plenty."""
    pinned = placement.gpu_layers > 0 and ledger.host.experts_bytes > 0 and left_bytes >= _PINNED_ROOM_BYTES
    return "none" if pinned else "mmap"


def _refusal(model: MemoryModel, placement: Placement, *, needed_bytes: int, budget_bytes: int) -> DoesNotFit:
    where = " beside what the devices hold" if placement.gpu_layers else ""
    requests = "a request" if placement.parallel == 1 else f"{placement.parallel} requests"
    return DoesNotFit(
        f"{model.shape.facts.name} needs {mib(needed_bytes)} of RAM{where} for {requests} of "
        f"{placement.context_per_request} tokens, but only {mib(max(0, budget_bytes))} may be used (what is available "
        "less the reserve): take a smaller quantisation or model, a smaller context, or free some RAM.",
        numbers={"ram_needed_bytes": needed_bytes, "ram_budget_bytes": budget_bytes},
    )
