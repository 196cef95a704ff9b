"""The settings that do not depend on how much fits: context, batches, threads, flash attention, cache types."""

from __future__ import annotations

import math
from dataclasses import replace

from app.errors import ContextAboveTrained, DoesNotFit, ModelFileError
from app.hardware import Machine
from app.memory import KVType, MemoryModel, Placement
from app.memory.placement import padded
from app.offload.wish import Wish

_DEFAULT_CONTEXT = 8192
DEVICE_UBATCH = 512
"""Tokens that a device computes at once; more cost memory and cut the number of copies from RAM."""
DRAFT_TOKENS = 3
"""Tokens that a draft guesses ahead, the engine's default: further ones are right too rarely."""
_DEVICE_BATCH = 2048
# 4 % slower prefill than 512 on two cores, and a cancelled request is let go four times sooner.
_CPU_BATCH = 128
_QUANTISED_HEAD_MULTIPLE = 32
# Head sizes (K, V) that devices have a flash attention kernel for; others would be computed on the CPU.
_FLASH_HEADS = frozenset({(size, size) for size in (40, 64, 72, 80, 96, 112, 128, 256)} | {(192, 128), (576, 512)})


def base_placement(model: MemoryModel, machine: Machine, wish: Wish) -> Placement:
    """Nothing on a device yet, no caches yet. Raises ContextAboveTrained."""
    context = _context(model, wish)
    _check_draft_head(model, wish)
    batch, ubatch = _batches(machine, wish, context)
    return Placement(
        gpu_layers=0,
        cpu_moe_layers=0,
        tensor_split=(),
        kv_cache_k=KVType.F16,
        kv_cache_v=KVType.F16,
        flash_attention=_flash_attention(model, machine),
        context_per_request=context,
        parallel=wish.parallel,
        batch=batch,
        ubatch=ubatch,
        threads=machine.threads,
        load_mode="mmap",
        cache_ram_mib=0,
        context_checkpoints=0,
        mmproj_on=None,
        embedding=wish.embedding,
        draft_head=wish.draft_head,
        draft_tokens=DRAFT_TOKENS if wish.draft_head or model.draft is not None else 0,
    )


def cache_types(model: MemoryModel, wish: Wish) -> tuple[KVType, ...]:
    """Cache types to try in this order. Raises DoesNotFit for a wish that the heads of the model do not allow."""
    shape = model.shape
    heads = (shape.key_length, shape.value_length)
    divisible = all(head % _QUANTISED_HEAD_MULTIPLE == 0 for head in heads)
    if wish.kv_cache != "auto":
        kind = KVType(wish.kv_cache)
        if kind.quantised and not divisible:
            raise DoesNotFit(
                f"{shape.facts.name} cannot have a {kind.value} cache because its heads are {heads[0]} and {heads[1]} "
                f"elements wide, not multiples of {_QUANTISED_HEAD_MULTIPLE}: set kv_cache to f16 or auto.",
                numbers={"key_length": heads[0], "value_length": heads[1]},
            )
        return (kind,)
    if not divisible or not any(cache.key for cache in model.caches):
        return (KVType.F16,)
    return (KVType.F16, KVType.Q8_0, KVType.Q4_0)


def with_cache(placement: Placement, kind: KVType) -> Placement:
    """``placement`` with caches of ``kind``; V stays in f16 without flash attention, which alone unpacks it."""
    value = kind if placement.flash_attention or not kind.quantised else KVType.F16
    return replace(placement, kv_cache_k=kind, kv_cache_v=value)


def _check_draft_head(model: MemoryModel, wish: Wish) -> None:
    if wish.draft_head and not model.head_caches:
        raise ModelFileError(
            f"{model.shape.facts.name} has no draft head of its own: name a small model of the same vocabulary as its "
            "draft, or take the setting away."
        )


def _context(model: MemoryModel, wish: Wish) -> int:
    trained = model.shape.facts.context_trained
    if wish.context is None:
        return min(_DEFAULT_CONTEXT, trained) if trained > 0 else _DEFAULT_CONTEXT
    if 0 < trained < wish.context:
        raise ContextAboveTrained(
            f"{model.shape.facts.name} was trained for {trained} tokens, so a context of {wish.context} would only "
            f"yield nonsense: set context to {trained} or less.",
            numbers={"context_tokens": wish.context, "context_trained_tokens": trained},
        )
    return wish.context


def _batches(machine: Machine, wish: Wish, context: int) -> tuple[int, int]:
    """An embedding needs its whole text in one ubatch; on a CPU a batch is what a cancelled request waits for."""
    if wish.embedding:
        # A slot has that many cells, so no text that it takes is longer. The engine sizes the graph of pooled vectors
        # for as many tokens of each sequence, and aborts at load where they do not divide the batch.
        size = math.ceil(padded(context) / wish.parallel) * wish.parallel
        return size, size
    return (_DEVICE_BATCH, DEVICE_UBATCH) if machine.devices else (_CPU_BATCH, _CPU_BATCH)


def _flash_attention(model: MemoryModel, machine: Machine) -> bool:
    """Wherever there is a kernel for it; the CPU has one for every head size."""
    shape = model.shape
    heads = (shape.key_length, shape.value_length)
    return not machine.devices or not any(shape.kv_heads) or heads in _FLASH_HEADS
