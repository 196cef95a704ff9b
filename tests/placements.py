"""A placement to begin with; tests change what they are about."""

from __future__ import annotations

from app.memory import KVType, Placement

BASE = Placement(
    gpu_layers=0,
    cpu_moe_layers=0,
    tensor_split=(),
    kv_cache_k=KVType.F16,
    kv_cache_v=KVType.F16,
    flash_attention=True,
    context_per_request=4096,
    parallel=1,
    batch=2048,
    ubatch=512,
    threads=2,
    load_mode="mmap",
    cache_ram_mib=0,
    context_checkpoints=0,
    mmproj_on=None,
)
