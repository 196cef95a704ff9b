"""What a key may use: reserved before the work, settled after it, given back when it failed."""

from app.quota.clock import SteadyClock
from app.quota.headers import rate_headers
from app.quota.ledger import Ledger, Standing, Ticket
from app.quota.limits import Amounts, Limits, Window
from app.quota.memory_store import MemoryStore
from app.quota.quota import Quota, Reservation
from app.quota.refusals import BudgetSpent, QuotaUnavailable, RateLimited
from app.quota.sqlite_store import SQLiteStore
from app.quota.store import QuotaStore, open_store

__all__ = [
    "Amounts",
    "BudgetSpent",
    "Ledger",
    "Limits",
    "MemoryStore",
    "Quota",
    "QuotaStore",
    "QuotaUnavailable",
    "RateLimited",
    "Reservation",
    "SQLiteStore",
    "Standing",
    "SteadyClock",
    "Ticket",
    "Window",
    "open_store",
    "rate_headers",
]
