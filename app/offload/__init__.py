"""Pure: ledger + machine + wish → plan, or why not."""

from __future__ import annotations

from app.offload.alternatives import Alternative, alternatives
from app.offload.confirm import Confirmation
from app.offload.expected import Expected
from app.offload.plan import OffloadPlan, Reason
from app.offload.planner import plan_offload
from app.offload.verified import Verified
from app.offload.wish import Wish

__all__ = [
    "Alternative",
    "Confirmation",
    "Expected",
    "OffloadPlan",
    "Reason",
    "Verified",
    "Wish",
    "alternatives",
    "plan_offload",
]
