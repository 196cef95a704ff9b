"""A plan on a terminal: why each setting is what it is, the ledger as a table, each memory as a bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.memory import DeviceLedger, HostLedger
from app.offload import OffloadPlan
from app.offload.alternatives import Alternative

_MIB = 1 << 20
_BAR_WIDTH = 60
_RESERVE, _LEFT, _OVER = "r", ".", "!"


@dataclass(frozen=True, slots=True)
class _Part:
    """A row of the table, and the letter that draws it."""

    field: str
    label: str
    letter: str


_PARTS = (
    _Part("weights_bytes", "weights", "W"),
    _Part("experts_bytes", "experts", "E"),
    _Part("kv_cache_bytes", "K and V cache", "K"),
    _Part("state_bytes", "recurrent state", "S"),
    _Part("compute_bytes", "compute buffers", "C"),
    _Part("mmproj_bytes", "projector", "P"),
    _Part("draft_bytes", "draft model", "D"),
    _Part("moe_cache_bytes", "experts kept twice", "X"),
    _Part("prompt_cache_bytes", "prompt cache, at most", "p"),
    _Part("checkpoints_bytes", "checkpoints, at most", "c"),
)


@dataclass(frozen=True, slots=True)
class _Place:
    """A device or RAM: its ledger, what may be used there, and the engine's own figure where it was asked."""

    name: str
    ledger: DeviceLedger | HostLedger
    free_bytes: int
    reserve_bytes: int
    engine_bytes: int | None

    def part(self, part: _Part) -> int:
        return int(getattr(self.ledger, part.field, 0))

    @property
    def left_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes - self.ledger.total_bytes


def explanation(plan: OffloadPlan) -> Iterator[str]:
    """The whole plan, line by line."""
    yield from plan.summary()
    yield ""
    yield from _reasons(plan)
    places = _places(plan)
    yield ""
    yield from _table(places)
    yield ""
    for place in places:
        yield _bar(place, width=max(len(place.name) for place in places))
    yield _legend(places)


def offers(found: Sequence[Alternative]) -> Iterator[str]:
    """What would fit instead, one change a line."""
    if not found:
        yield "No single change makes it fit."
        return
    yield "What would fit instead, one change at a time:"
    width = max(len(f"{offer.setting} {offer.value}") for offer in found)
    for offer in found:
        yield f"  {offer.setting + ' ' + offer.value:<{width}}  {offer.gives}"


def _reasons(plan: OffloadPlan) -> Iterator[str]:
    width = max(len(f"{reason.setting} {reason.value}") for reason in plan.reasons)
    width = min(width, 34)
    for reason in plan.reasons:
        yield f"  {reason.setting + ' ' + reason.value:<{width}}  {reason.because}"
    yield f"  expected  {_speed(plan)}"


def _speed(plan: OffloadPlan) -> str:
    expected = plan.expected
    rates = [
        f"{rate:,.0f} {what}"
        for rate, what in (
            (expected.decode_tokens_per_second, "tokens/s"),
            (expected.prompt_tokens_per_second, "prompt tokens/s"),
        )
        if rate is not None
    ]
    return f"about {' and '.join(rates)} ({expected.basis})" if rates else expected.basis


def _places(plan: OffloadPlan) -> list[_Place]:
    accounting = plan.verified.accounting if plan.verified is not None else None
    places = [
        _Place(
            device.name,
            ledger,
            device.free_bytes,
            plan.wish.vram_reserve_bytes,
            accounting.device(device.name).total_bytes if accounting else None,
        )
        for device, ledger in zip(plan.machine.devices, plan.memory.devices, strict=True)
    ]
    ram = plan.machine.ram_available_bytes
    engine_bytes = accounting.host.total_bytes if accounting else None
    return [*places, _Place("RAM", plan.memory.host, ram, plan.wish.ram_reserve_bytes, engine_bytes)]


def _table(places: Sequence[_Place]) -> Iterator[str]:
    yield _row("MiB", [place.name for place in places])
    for part in _PARTS:
        if any(place.part(part) for place in places):
            yield _row(part.label, [_mib(place.part(part)) for place in places])
    yield _row("total", [_mib(place.ledger.total_bytes) for place in places])
    if any(place.engine_bytes is not None for place in places):
        yield _row("the engine says", [_mib(place.engine_bytes or 0) for place in places])
    yield _row("reserve", [_mib(place.reserve_bytes) for place in places])
    yield _row("left", [_mib(place.left_bytes) for place in places])


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<22}" + "".join(f"{cell:>12}" for cell in cells)


def _bar(place: _Place, *, width: int) -> str:
    """One letter for each sixtieth of what is free; a part too small for one is not drawn."""
    pieces = [(part.letter, place.part(part)) for part in _PARTS]
    scale = max(place.free_bytes, place.ledger.total_bytes + place.reserve_bytes, 1)
    drawn, position = "", 0
    for letter, size in [*pieces, (_LEFT, max(0, place.left_bytes)), (_RESERVE, place.reserve_bytes)]:
        position += size
        drawn += letter * (round(position / scale * _BAR_WIDTH) - len(drawn))
    over = f" {_OVER} {_mib(-place.left_bytes)} MiB over" if place.left_bytes < 0 else ""
    return f"  {place.name:<{width}} [{drawn:<{_BAR_WIDTH}}] {_mib(place.free_bytes)} MiB free{over}"


def _legend(places: Sequence[_Place]) -> str:
    used = [f"{part.letter} {part.label}" for part in _PARTS if any(place.part(part) for place in places)]
    return "  " + ", ".join([*used, f"{_LEFT} left", f"{_RESERVE} reserve"])


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f}"
