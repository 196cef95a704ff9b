"""The exchanges that are open, and how they end when the gateway stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from app.errors import Draining, GatewayError

_TELL_SECONDS = 1.0


class Exchange(Protocol):
    """Something that does its ``work`` and can be broken off."""

    @property
    def work(self) -> object:
        """What it does."""

    def cut(self, error: GatewayError) -> None:
        """Break it off; the client is told ``error``."""


class Exchanges:
    """The open ones; ``drain`` lets them end and lets no more begin."""

    def __init__(self) -> None:
        self._open: set[Exchange] = set()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __iter__(self) -> Iterator[Exchange]:
        return iter(tuple(self._open))

    def admit(self) -> None:
        """Raises Draining when no more may begin."""
        if self._is_draining:
            raise Draining("The gateway is stopping; try again.", retry_after_seconds=5)

    @contextmanager
    def tracked(self, exchange: Exchange) -> Iterator[None]:
        """Count an exchange as open until the block ends."""
        self._open.add(exchange)
        self._idle.clear()
        try:
            yield
        finally:
            self._open.discard(exchange)
            if not self._open:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new exchanges, let the open ones end, and after ``seconds`` end them with an error."""
        self._is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for exchange in tuple(self._open):
                exchange.cut(Draining("The gateway is stopping; the answer was broken off.", retry_after_seconds=5))
            # A client that does not read cannot be told.
            with suppress(TimeoutError):
                async with asyncio.timeout(_TELL_SECONDS):
                    await self._idle.wait()
