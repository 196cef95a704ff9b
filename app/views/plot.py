"""A series of numbers as the path of an SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 240, 48
_HEADROOM = 1.15


@dataclass(frozen=True, slots=True)
class Plot:
    """``line`` and ``area`` are path data in a box of WIDTH × HEIGHT; ``highest`` is the largest value drawn."""

    line: str
    area: str
    highest: float


def plot(values: Sequence[float | None], *, slots: int, least_scale: float = 1.0) -> Plot:
    """The last ``slots`` values, newest at the right edge; None breaks the line.

    ``least_scale`` is the value that at least fits the height, so that noise around nothing looks like nothing.
    """
    values = values[-slots:]
    highest = max((value for value in values if value is not None), default=0.0)
    scale = HEIGHT / max(least_scale, highest * _HEADROOM)
    step = WIDTH / max(1, slots - 1)
    offset = WIDTH - step * (len(values) - 1)
    lines, areas = [], []
    for run in _runs(values):
        points = [f"{offset + step * place:.1f} {HEIGHT - value * scale:.1f}" for place, value in run]
        first, last = offset + step * run[0][0], offset + step * run[-1][0]
        lines.append("M" + "L".join(points))
        areas.append(f"M{first:.1f} {HEIGHT}L" + "L".join(points) + f"L{last:.1f} {HEIGHT}Z")
    return Plot("".join(lines), "".join(areas), highest)


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Stretches of neighbours that are all known."""
    runs: list[list[tuple[int, float]]] = []
    for place, value in enumerate(values):
        if value is None:
            continue
        if not runs or runs[-1][-1][0] != place - 1:
            runs.append([])
        runs[-1].append((place, value))
    return runs
