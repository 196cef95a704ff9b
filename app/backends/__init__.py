"""Something that answers: an engine of our own, or a server elsewhere."""

from app.backends.base import Backend, Reply
from app.backends.breaker import Circuit
from app.backends.departure import Departure
from app.backends.local import LocalBackend
from app.backends.remote import RemoteBackend, RemoteRules

__all__ = ["Backend", "Circuit", "Departure", "LocalBackend", "RemoteBackend", "RemoteRules", "Reply"]
