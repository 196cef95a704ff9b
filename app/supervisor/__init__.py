"""Owns every engine: who is loaded, for whom, how long, and what happens when one dies."""

from app.supervisor.changes import Changes
from app.supervisor.planning import planned_parts, requested_context, wish_for
from app.supervisor.status import Failure, ModelStatus
from app.supervisor.supervisor import Supervisor

__all__ = ["Changes", "Failure", "ModelStatus", "Supervisor", "planned_parts", "requested_context", "wish_for"]
