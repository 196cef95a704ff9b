"""The seam: who keeps what has been used, and how the configuration names them."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from app.errors import ConfigError, SetupError
from app.quota.ledger import Standing, Ticket
from app.quota.limits import Amounts, Limits

# Loaded when the configuration asks for it, since its package is an extra.
_BY_SCHEME: Mapping[str, str] = {
    "memory": "app.quota.memory_store:MemoryStore",
    "sqlite": "app.quota.sqlite_store:SQLiteStore",
    "redis": "app.quota.redis_store:RedisStore",
    "rediss": "app.quota.redis_store:RedisStore",
    "unix": "app.quota.redis_store:RedisStore",
}


class QuotaStore(Protocol):
    """Keeps what keys have used."""

    @classmethod
    def at(cls, address: str, *, base: Path, fail_open: bool) -> QuotaStore:
        """The store at an address of the configuration; relative files start at ``base``."""

    async def open(self) -> None:
        """Begin; raises StorageError for what only the operator can mend."""

    async def close(self) -> None:
        """Write what is not written yet."""

    async def reserve(self, key: str, limits: Limits, asked: Amounts) -> Ticket:
        """Take it or raise RateLimited or BudgetSpent; QuotaUnavailable when nobody knows. At most a second."""

    def settle(self, ticket: Ticket, actual: Amounts) -> None:
        """Replace what was reserved by what was used; returns at once."""

    async def standing(self, key: str, limits: Limits) -> tuple[Standing, ...]:
        """How the key stands in every window."""


def open_store(address: str, *, base: Path, fail_open: bool) -> QuotaStore:
    """The store that ``quota.store`` names: ``sqlite:FILE``, ``redis://…``, ``memory:``; raises ConfigError.

    It is made, not opened: nothing is touched before ``open``.
    """
    scheme = address.partition(":")[0]
    if scheme not in _BY_SCHEME or ":" not in address:
        raise ConfigError(
            f"quota.store: {address.partition('@')[0][:80]!r} is not known; "
            "write sqlite:FILE, redis://HOST:PORT/0, unix:SOCKET or memory:."
        )
    try:
        store = cast("type[QuotaStore]", pkgutil.resolve_name(_BY_SCHEME[scheme]))
    except ModuleNotFoundError as error:
        raise SetupError(
            f"quota.store: {scheme} needs the package {error.name!r}; install llama-gateway[redis]."
        ) from None
    return store.at(address, base=base, fail_open=fail_open)
