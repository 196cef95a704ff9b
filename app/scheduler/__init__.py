"""Admission: the gateway owns the queue, so that no engine ever has more requests in flight than slots."""

from app.scheduler.affinity import Affinities, SlotAffinity, prefix_chain
from app.scheduler.demand import Demand, Rules, Urgency
from app.scheduler.scheduler import Lease, Scheduler

__all__ = ["Affinities", "Demand", "Lease", "Rules", "Scheduler", "SlotAffinity", "Urgency", "prefix_chain"]
