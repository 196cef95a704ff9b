"""One request's budget: reserved when the block begins, settled when it ends, however it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from app.errors import GatewayError
from app.quota.headers import rate_headers
from app.quota.ledger import Ticket
from app.quota.limits import Amounts, Limits
from app.quota.store import QuotaStore


class Reservation:
    """What a request may use; ``charge`` says what it has used so far, the last word counts."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._used: Amounts | None = None

    def charge(self, *, tokens: int, gpu_seconds: float = 0.0) -> None:
        """Tokens processed and generated, and seconds for which the engine worked on it."""
        self._used = Amounts(1, max(0, tokens), max(0, round(gpu_seconds * 1000)))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """How the key stands with this reservation taken off."""
        return rate_headers(self._ticket.standing)

    def actual(self, *, failed: bool) -> Amounts:
        """What to book: without a charge nothing but the request itself, and not even that for a failure of ours."""
        return self._used or Amounts(0 if failed else 1)


class Quota:
    """The budgets of all keys, kept by a store."""

    def __init__(self, store: QuotaStore) -> None:
        self._store = store

    async def open(self) -> None:
        """Begin; raises StorageError."""
        await self._store.open()

    async def close(self) -> None:
        """Write what is not written yet."""
        await self._store.close()

    @asynccontextmanager
    async def reserve(
        self, key: str, limits: Limits, *, tokens: int, gpu_seconds: float = 0.0
    ) -> AsyncIterator[Reservation]:
        """Take at most ``tokens`` and ``gpu_seconds`` until the block ends, then only what was charged.

        Raises RateLimited, BudgetSpent or QuotaUnavailable, within a second and before the block.
        """
        asked = Amounts(1, max(0, tokens), max(0, round(gpu_seconds * 1000)))
        ticket = await self._store.reserve(key, limits, asked)
        reservation, failed = Reservation(ticket), False
        try:
            yield reservation
        except GatewayError as error:
            failed = error.status >= 500
            raise
        finally:
            self._store.settle(ticket, reservation.actual(failed=failed))

    async def usage(self, key: str, limits: Limits) -> dict[str, Any]:
        """The figures of one key: per window what is used, the limit, and when nothing of it is used any more."""
        return {
            one.window.label: {
                "used": one.spent / 1000 if one.window.unit == "gpu_milliseconds" else one.spent,
                "limit": getattr(limits, one.window.label),
                "resets_in_seconds": round(one.resets_in_seconds),
            }
            for one in await self._store.standing(key, limits)
        }
