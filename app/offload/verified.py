"""The engine's own word on a plan, beside the plan's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.memory import AccountedMemory, Accounting, MemoryLedger


@dataclass(frozen=True, slots=True)
class Verified:
    """What the engine said of these very flags before it read a weight; ``corrections`` counts re-made plans."""

    accounting: Accounting
    corrections: int = 0

    def document(self, ledger: MemoryLedger, *, mmproj_on_host: bool, draft_on_host: bool = False) -> dict[str, Any]:
        """The engine's figures, and the plan's total for each place; projector and draft model are in neither."""
        apart = (self.accounting.mmproj_bytes or 0) if mmproj_on_host else 0
        draft = self.accounting.draft
        apart += draft.host.total_bytes if draft is not None and draft_on_host else 0
        return {
            "by": self.accounting.by,
            "devices": [
                _row(self.accounting.device(device.name), device.total_bytes - device.mmproj_bytes - device.draft_bytes)
                for device in ledger.devices
            ],
            "host": _row(self.accounting.host, ledger.host.needed_bytes - apart),
            "mmproj_bytes": self.accounting.mmproj_bytes,
            "draft_bytes": None if draft is None else sum(row.total_bytes for row in (*draft.devices, draft.host)),
            "corrections": self.corrections,
        }


def _row(row: AccountedMemory, planned_bytes: int) -> dict[str, Any]:
    return {
        "name": row.name,
        "weights_bytes": row.weights_bytes,
        "context_bytes": row.context_bytes,
        "compute_bytes": row.compute_bytes,
        "total_bytes": row.total_bytes,
        "planned_bytes": planned_bytes,
    }
