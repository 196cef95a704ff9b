"""Stacked bars and the table under them: a place of memory as numbers to draw. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from app.views.memory_map import PARTS, Place, Portion

_WIDTH = 1000.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a bar, in thousandths of its width."""

    part: str
    model: str
    title: str
    size_bytes: int
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Row:
    """One part of one model: bytes by plan and as measured, None for what the other side does not name."""

    model: str
    part: str
    label: str
    planned: int | None
    measured: int | None


def pieces(place: Place, portions: Sequence[Portion]) -> Iterator[Piece]:
    """From the left what others hold and ``portions``, from the right what is kept free."""
    needed = place.others_bytes + place.reserve_bytes + max(place.planned_bytes, place.measured_bytes)
    scale = _WIDTH / max(1, place.total_bytes, needed)
    x = 0.0
    for model, part, size_bytes, title in _in_order(place, portions):
        width = size_bytes * scale
        yield Piece(part, model, title, size_bytes, round(x, 2), round(width, 2))
        x += width
    width = place.reserve_bytes * scale
    yield Piece("reserve", "", "Kept free", place.reserve_bytes, round(_WIDTH - width, 2), round(width, 2))


def rows(place: Place) -> list[Row]:
    """Every part that the plan or the engine names, model by model."""
    planned = {(one.model, one.part): one.size_bytes for one in place.planned}
    measured = {(one.model, one.part): one.size_bytes for one in place.measured}
    order = {part: number for number, part in enumerate(PARTS)}
    models = list(dict.fromkeys(one.model for one in (*place.planned, *place.measured)))
    keys = sorted({*planned, *measured}, key=lambda key: (models.index(key[0]), order[key[1]]))
    return [Row(*key, PARTS[key[1]], planned.get(key), measured.get(key)) for key in keys]


def _in_order(place: Place, portions: Iterable[Portion]) -> Iterator[tuple[str, str, int, str]]:
    yield "", "others", place.others_bytes, "Other programs"
    for one in portions:
        yield one.model, one.part, one.size_bytes, f"{one.model}, {PARTS[one.part].lower()}"
