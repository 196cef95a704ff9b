"""Which layer lives where, by the engine's own rule (llama.cpp src/llama-model.cpp load_tensors)."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from app.memory.placement import Placement

HOST = -1


def layer_owners(entries: int, placement: Placement, *, devices: int) -> tuple[int, ...]:
    """Index of the device of every block and, last, of the output layer; HOST for those in RAM.

    The last ``gpu_layers`` entries go to devices, split among them by ``tensor_split``.
    """
    offloaded = min(max(placement.gpu_layers, 0), entries) if devices else 0
    start = entries - offloaded
    if devices <= 1 or not placement.tensor_split:
        return (HOST,) * start + (0,) * offloaded
    total = sum(placement.tensor_split)
    borders = [share / total for share in accumulate(placement.tensor_split)]
    owners = (min(bisect_right(borders, index / offloaded), devices - 1) for index in range(offloaded))
    return (HOST,) * start + tuple(owners)
