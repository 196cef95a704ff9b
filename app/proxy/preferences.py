"""What a client may wish beside the body of its request."""

from __future__ import annotations

from dataclasses import dataclass

from app.scheduler import Urgency
from app.tokens import Overflow


@dataclass(frozen=True, slots=True)
class Preferences:
    """None leaves it to key and model."""

    overflow: Overflow | None = None
    urgency: Urgency | None = None
