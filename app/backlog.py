"""What is to be written down later: taken at once, written in batches by a thread, bounded, and never waited for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_PAUSE_SECONDS = 0.5


class Backlog(Generic[_T]):
    """``write`` gets batches in order, one at a time; it may raise OSError, and then the batch is lost.

    ``put`` belongs to the event loop's thread. ``on_lost`` is told how many items were lost, to a full backlog or a
    failed write; ``what`` names it in the log.
    """

    def __init__(
        self,
        what: str,
        write: Callable[[Sequence[_T]], None],
        *,
        most: int,
        on_lost: Callable[[int], None],
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        self._what = what
        self._write = write
        self._most = most
        self._on_lost = on_lost
        self._pause_seconds = pause_seconds
        self._items: deque[_T] = deque()
        self._is_failing = False

    def put(self, item: _T) -> None:
        """Take one; a full backlog drops it."""
        if len(self._items) >= self._most:
            self._on_lost(1)
        else:
            self._items.append(item)

    async def run(self) -> None:
        """Write until cancelled, then once more."""
        try:
            while True:
                await asyncio.sleep(self._pause_seconds)
                await self.flush()
        finally:
            await self.flush()

    async def flush(self) -> None:
        """Write what is there."""
        batch = list(self._items)
        self._items.clear()
        if not batch:
            return
        try:
            await asyncio.to_thread(self._write, batch)
            self._is_failing = False
        except OSError as error:
            self._on_lost(len(batch))
            if not self._is_failing:
                _log.warning("%s cannot be written (%s); what comes meanwhile is lost", self._what, error)
            self._is_failing = True
