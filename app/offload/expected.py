"""What speed to expect: bytes read per token over assumed bandwidths, a roofline and not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from app.memory import HostLedger, MemoryLedger, MemoryModel, Placement

_RAM_BYTES_PER_SECOND = 40e9
_RAM_ALONE_BYTES_PER_SECOND = 20e9
_VRAM_BYTES_PER_SECOND = 300e9
_HOP_SECONDS = 20e-6
# What a device copies from RAM for each ubatch, and computes; what one core computes.
_COPY_BYTES_PER_SECOND = 12.5e9
_DEVICE_FLOPS = 25e12
_CORE_FLOPS = 40e9
_CACHE_FILLED = 0.5


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens per second of one request; ``basis`` names the assumptions."""

    decode_tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    basis: str


def expect(model: MemoryModel, placement: Placement, ledger: MemoryLedger) -> Expected:
    """One token reads every dense weight, its share of the experts and a half-full cache, once each."""
    shape = model.shape
    share = min(1.0, shape.experts_used / shape.experts) if shape.experts and shape.experts_used else 1.0
    host = ledger.host
    # Of the token embedding one row is read, unless it is also the output matrix.
    looked_up = model.weights.input_bytes - (0 if placement.gpu_layers else model.weights.tied_bytes)
    host_bytes = max(0, host.weights_bytes - looked_up) + host.experts_bytes * share
    host_bytes += (host.kv_cache_bytes * _CACHE_FILLED + host.state_bytes) / placement.parallel
    device_bytes = sum(
        device.weights_bytes
        + device.experts_bytes * share
        + (device.kv_cache_bytes * _CACHE_FILLED + device.state_bytes) / placement.parallel
        for device in ledger.devices
    )
    ram_speed = _RAM_BYTES_PER_SECOND if placement.gpu_layers else _RAM_ALONE_BYTES_PER_SECOND
    hops = 2 * min(placement.cpu_moe_layers, shape.layers) if placement.gpu_layers else 0
    seconds = host_bytes / ram_speed + device_bytes / _VRAM_BYTES_PER_SECOND + hops * _HOP_SECONDS
    basis = f"roofline: {host_bytes / 1e6:,.0f} MB per token from RAM at {ram_speed / 1e9:.0f} GB/s"
    if placement.gpu_layers:
        basis += f", {device_bytes / 1e6:,.0f} MB from devices at {_VRAM_BYTES_PER_SECOND / 1e9:.0f} GB/s"
    return Expected(
        decode_tokens_per_second=round(1 / seconds, 1) if seconds > 0 else None,
        prompt_tokens_per_second=_prompt_rate(model, placement, host, share),
        basis=basis + ", bandwidths and compute assumed",
    )


def _prompt_rate(model: MemoryModel, placement: Placement, host: HostLedger, share: float) -> float | None:
    """A long prompt multiplies each weight in use once per token, and copies what lies in RAM once per ubatch."""
    used = sum(
        tensor.elements * (share if "_exps" in tensor.name else 1.0)
        for tensor in model.shape.facts.tensors
        if tensor.name.startswith("blk.")
    )
    if placement.gpu_layers:
        copied = max(0, host.weights_bytes - model.weights.input_bytes) + host.experts_bytes
        tokens = placement.graph_tokens
        seconds = copied / _COPY_BYTES_PER_SECOND + 2 * used * tokens / _DEVICE_FLOPS
    else:
        tokens, seconds = 1, 2 * used / (_CORE_FLOPS * placement.threads)
    return round(tokens / seconds, 1) if seconds > 0 else None
