"""What the engine itself says a placement takes, in the coarser parts that it knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AccountedMemory:
    """One device, or all of RAM: weights with experts, caches with states, buffers of the graph; in bytes."""

    name: str
    weights_bytes: int = 0
    context_bytes: int = 0
    compute_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything there that the engine knows of; a projector is not in it."""
        return self.weights_bytes + self.context_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class Accounting:
    """The engine's own word on one command line; ``by`` names it, ``mmproj_bytes`` is None where it does not say.

    ``exact_host`` is False when the figures for RAM are no sum of tensors: a mapped file counts from its first tensor
    there to its last. ``draft`` is what it says of a draft model beside this one.
    """

    by: str
    devices: tuple[AccountedMemory, ...]
    host: AccountedMemory
    mmproj_bytes: int | None = None
    exact_host: bool = True
    draft: Accounting | None = None

    def device(self, name: str) -> AccountedMemory:
        """What is on a device; nothing for one that the engine does not use."""
        return next((row for row in self.devices if row.name == name), AccountedMemory(name))
