"""Does a model run slower than it can, and why: spilled memory, pages read from disk, or just half its usual speed."""

from app.slowdown.detector import Detector, Look, Slowdown
from app.slowdown.watch import SlowdownWatch

__all__ = ["Detector", "Look", "Slowdown", "SlowdownWatch"]
