"""Pure: ledger + machine + wish → plan, or why not."""

from __future__ import annotations

from app.offload.expected import Expected
from app.offload.plan import OffloadPlan, Reason
from app.offload.planner import plan_offload
from app.offload.wish import Wish

__all__ = ["Expected", "OffloadPlan", "Reason", "Wish", "plan_offload"]
