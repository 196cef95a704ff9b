"""Facts of a model file → bytes on every device and in RAM, one file per family of formulas."""

from __future__ import annotations

from app.memory.accounting import AccountedMemory, Accounting
from app.memory.correction import Correction, correction_of
from app.memory.families import REGISTRY, Family
from app.memory.ledger import DeviceLedger, HostLedger, MemoryLedger
from app.memory.model import MemoryModel, estimate
from app.memory.placement import KVType, Placement

__all__ = [
    "REGISTRY",
    "AccountedMemory",
    "Accounting",
    "Correction",
    "DeviceLedger",
    "Family",
    "HostLedger",
    "KVType",
    "MemoryLedger",
    "MemoryModel",
    "Placement",
    "correction_of",
    "estimate",
]
