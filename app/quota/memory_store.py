"""Budgets that last as long as the process."""

from __future__ import annotations

from pathlib import Path

from app.quota.clock import SteadyClock
from app.quota.ledger import Ledger, Standing, Ticket
from app.quota.limits import Amounts, Limits


class MemoryStore:
    """A ledger and a clock; ``sqlite:`` adds the file."""

    def __init__(self, *, clock: SteadyClock | None = None) -> None:
        self.clock = clock or SteadyClock()
        self.ledger = Ledger()

    @classmethod
    def at(cls, address: str, *, base: Path, fail_open: bool) -> MemoryStore:
        """``memory:`` takes nothing."""
        return cls()

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def reserve(self, key: str, limits: Limits, asked: Amounts) -> Ticket:
        """Take it or raise RateLimited or BudgetSpent."""
        return self.ledger.reserve(key, limits, asked, now=self.clock.now())

    def settle(self, ticket: Ticket, actual: Amounts) -> None:
        """Replace what was reserved by what was used."""
        self.ledger.settle(ticket, actual, now=self.clock.now())

    async def standing(self, key: str, limits: Limits) -> tuple[Standing, ...]:
        """How the key stands in every window."""
        return self.ledger.standing(key, limits, now=self.clock.now())
