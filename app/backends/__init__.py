"""Something that answers: an engine of our own, later also one elsewhere."""

from app.backends.base import Backend, Reply
from app.backends.local import LocalBackend

__all__ = ["Backend", "LocalBackend", "Reply"]
