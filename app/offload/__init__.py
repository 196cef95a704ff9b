"""Pure: ledger + machine + wish → plan, or why not."""

from __future__ import annotations

from app.offload.alternatives import Alternative, alternatives
from app.offload.confirm import Confirmation, with_word
from app.offload.expected import Expected
from app.offload.plan import OffloadPlan, Reason, mib
from app.offload.planner import plan_offload
from app.offload.step_down import MOST_STEPS, Shortage, missing, replanned, step_down
from app.offload.verified import Verified
from app.offload.wish import Wish

__all__ = [
    "MOST_STEPS",
    "Alternative",
    "Confirmation",
    "Expected",
    "OffloadPlan",
    "Reason",
    "Shortage",
    "Verified",
    "Wish",
    "alternatives",
    "mib",
    "missing",
    "plan_offload",
    "replanned",
    "step_down",
    "with_word",
]
