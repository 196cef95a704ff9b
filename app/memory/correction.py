"""What one engine was found to take beyond the formulas, or short of them; applied to every ledger of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.memory.accounting import AccountedMemory, Accounting
from app.memory.ledger import DeviceLedger, HostLedger, MemoryLedger

_MIB = 1 << 20
# The engine rounds each figure to a MiB, and a part has several.
_NOISE_BYTES = 3 * _MIB
_LEAST_FACTOR, _MOST_FACTOR = 0.01, 10.0
_MOST_COMPUTE_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Correction:
    """Tensors and caches on devices are scaled, since they grow with the layers; the rest is shifted.

    ``mmproj_bytes`` and ``draft_bytes`` are what the engine itself says of the projector and of the draft model where
    that is, None where it has not said.
    """

    weights: float = 1.0
    context: float = 1.0
    compute_bytes: int = 0
    host_weights_bytes: int = 0
    host_context: float = 1.0
    host_compute_bytes: int = 0
    mmproj_bytes: int | None = None
    draft_bytes: int | None = None

    @property
    def is_none(self) -> bool:
        """Whether the formulas were right."""
        return self == Correction()

    def applied(self, ledger: MemoryLedger) -> MemoryLedger:
        """``ledger`` as this engine would count it."""
        if self.is_none:
            return ledger
        return MemoryLedger(tuple(self._device(device) for device in ledger.devices), self._host(ledger.host))

    def bounded(self) -> Correction:
        """This correction within the limits of what one may be: for one that comes out of a file."""
        return Correction(
            weights=_within(self.weights),
            context=_within(self.context),
            compute_bytes=_clamped(self.compute_bytes),
            host_weights_bytes=_clamped(self.host_weights_bytes),
            host_context=_within(self.host_context),
            host_compute_bytes=_clamped(self.host_compute_bytes),
            mmproj_bytes=_size(self.mmproj_bytes),
            draft_bytes=_size(self.draft_bytes),
        )

    def describe(self) -> str:
        """The differences in a few words, such as ``caches x1.50, buffers +120 MiB``."""
        words = [
            f"{what} x{factor:.2f}"
            for what, factor in (
                ("weights", self.weights),
                ("caches", self.context),
                ("caches in RAM", self.host_context),
            )
            if factor != 1
        ]
        words += [
            f"{what} {size / _MIB:+,.0f} MiB"
            for what, size in (
                ("buffers", self.compute_bytes),
                ("weights in RAM", self.host_weights_bytes),
                ("buffers in RAM", self.host_compute_bytes),
            )
            if size
        ]
        words += [
            f"{what} {size / _MIB:,.0f} MiB"
            for what, size in (("projector", self.mmproj_bytes), ("draft model", self.draft_bytes))
            if size is not None
        ]
        return ", ".join(words)

    def _device(self, ledger: DeviceLedger) -> DeviceLedger:
        # A device that holds nothing has no buffers either.
        is_used = ledger.total_bytes > ledger.mmproj_bytes + ledger.draft_bytes
        return replace(
            ledger,
            weights_bytes=round(ledger.weights_bytes * self.weights),
            experts_bytes=round(ledger.experts_bytes * self.weights),
            kv_cache_bytes=round(ledger.kv_cache_bytes * self.context),
            state_bytes=round(ledger.state_bytes * self.context),
            compute_bytes=max(0, ledger.compute_bytes + self.compute_bytes) if is_used else 0,
        )

    def _host(self, ledger: HostLedger) -> HostLedger:
        return replace(
            ledger,
            weights_bytes=max(0, ledger.weights_bytes + self.host_weights_bytes),
            kv_cache_bytes=round(ledger.kv_cache_bytes * self.host_context),
            state_bytes=round(ledger.state_bytes * self.host_context),
            compute_bytes=max(0, ledger.compute_bytes + self.host_compute_bytes),
        )


def correction_of(ledger: MemoryLedger, accounting: Accounting, *, noise_bytes: int = _NOISE_BYTES) -> Correction:
    """What turns ``ledger``, by the formulas alone, into what the engine says.

    A part that differs by no more than ``noise_bytes`` counts as right: the engine rounds each figure to a MiB.
    """
    pairs = [(device, accounting.device(device.name)) for device in ledger.devices]
    weights, weights_rest = _factor(
        sum(device.weights_bytes + device.experts_bytes for device, _ in pairs),
        sum(row.weights_bytes for _, row in pairs),
        noise_bytes,
    )
    context, context_rest = _factor(
        # The engine's cache of experts belongs to its context.
        sum(device.kv_cache_bytes + device.state_bytes + device.moe_cache_bytes for device, _ in pairs),
        sum(row.context_bytes for _, row in pairs),
        noise_bytes,
    )
    compute = [row.compute_bytes - device.compute_bytes for device, row in pairs if row.total_bytes]
    return replace(
        _host_correction(ledger.host, accounting.host, noise_bytes) if accounting.exact_host else Correction(),
        weights=weights,
        context=context,
        compute_bytes=_shift([difference + weights_rest + context_rest for difference in compute], noise_bytes),
        mmproj_bytes=accounting.mmproj_bytes,
        draft_bytes=None if accounting.draft is None else _placed(accounting.draft),
    )


def _placed(draft: Accounting) -> int:
    """What a draft model takes where it was put: on its device, else in RAM."""
    on_devices = sum(row.total_bytes for row in draft.devices)
    return on_devices or draft.host.total_bytes


def _host_correction(host: HostLedger, row: AccountedMemory, noise_bytes: int) -> Correction:
    context, context_rest = _factor(host.kv_cache_bytes + host.state_bytes, row.context_bytes, noise_bytes)
    return Correction(
        # Not scaled: what a device cannot take comes on top of what was meant for RAM.
        host_weights_bytes=_shift([row.weights_bytes - host.weights_bytes - host.experts_bytes], noise_bytes),
        host_context=context,
        host_compute_bytes=_shift([row.compute_bytes - host.compute_bytes + context_rest], noise_bytes),
    )


def _factor(own_bytes: int, engine_bytes: int, noise_bytes: int) -> tuple[float, int]:
    """What to scale by, and what must be added because there is nothing to scale or the scale has a limit."""
    if abs(engine_bytes - own_bytes) <= noise_bytes:
        return 1.0, 0
    factor = _within(engine_bytes / own_bytes) if own_bytes else 1.0
    return factor, engine_bytes - round(own_bytes * factor) if factor in (1.0, _LEAST_FACTOR, _MOST_FACTOR) else 0


def _within(factor: float) -> float:
    return min(max(float(factor), _LEAST_FACTOR), _MOST_FACTOR)


def _shift(differences: Sequence[int], noise_bytes: int) -> int:
    largest = max(differences, default=0)
    if abs(largest) <= noise_bytes:
        return 0
    return _clamped(largest)


def _size(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else max(0, _clamped(size_bytes))


def _clamped(size_bytes: float) -> int:
    return round(min(max(size_bytes, -_MOST_COMPUTE_BYTES), _MOST_COMPUTE_BYTES))
