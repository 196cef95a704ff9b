"""Facts of a model file → bytes on every device and in RAM, one file per family of formulas."""

from __future__ import annotations

from app.memory.ledger import DeviceLedger, HostLedger, MemoryLedger
from app.memory.model import MemoryModel, estimate
from app.memory.placement import KVType, Placement

__all__ = ["DeviceLedger", "HostLedger", "KVType", "MemoryLedger", "MemoryModel", "Placement", "estimate"]
