"""Pure: ledger + machine + wish → plan, or why not.

What follows on a plan is imported from its own module: ``alternatives`` when nothing fits, ``confirm`` when an engine
has counted, ``step_down`` when memory ran out. A plan that is only looked at needs none of them.
"""

from __future__ import annotations

from app.offload.expected import Expected
from app.offload.plan import OffloadPlan, Reason, mib
from app.offload.planner import plan_offload
from app.offload.verified import Verified
from app.offload.wish import Wish

__all__ = ["Expected", "OffloadPlan", "Reason", "Verified", "Wish", "mib", "plan_offload"]
