"""Budgets that outlive the process: decided in memory, in the file before the work begins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from app.quota.clock import SteadyClock
from app.quota.journal import Journal, JournalError, JournalReplaced
from app.quota.ledger import Row, Standing, Ticket
from app.quota.limits import Amounts, Limits
from app.quota.memory_store import MemoryStore
from app.quota.refusals import QuotaUnavailable

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_WAIT_SECONDS = 0.9
_RETRY_SECONDS = 1.0
_IDLE_SECONDS = 1.0
_GATHER_SECONDS = 0.1


class SQLiteStore:
    """One gateway's ledger with a file behind it.

    A reservation is granted when it is in the file, so that a process that is killed has never given away more than the
    file says; one that was open then counts as used. All that wait at a time share one commit. While the file cannot be
    written the memory goes on counting, and ``fail_open`` says whether that is good enough to serve.
    """

    def __init__(self, path: Path, *, fail_open: bool = False, clock: SteadyClock | None = None) -> None:
        self._memory = MemoryStore(clock=clock)
        self._journal = Journal(path)
        self._path = path
        self._fail_open = fail_open
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quota")
        self._dirty = asyncio.Event()
        self._urgent = asyncio.Event()
        self._batch: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self.is_failing = False

    @classmethod
    def at(cls, address: str, *, base: Path, fail_open: bool) -> SQLiteStore:
        """``sqlite:FILE``; ``sqlite:///FILE`` is an absolute path too."""
        name = address.partition(":")[2]
        name = name.removeprefix("//") if name.startswith("///") else name
        return cls(base / Path(name or "quota.db").expanduser(), fail_open=fail_open)

    async def open(self) -> None:
        """Read the file and begin to write it; raises StorageError."""
        kept = await self._on_thread(self._journal.open)
        if kept.mark is not None:
            self._memory.clock.resume(kept.mark)
        self._memory.ledger.load(kept.rows)
        self._writer = asyncio.create_task(self._write_forever(), name="quota writer")

    async def close(self) -> None:
        """Write what is left; a file that cannot be written is given up."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            await self._write()
        await self._on_thread(self._journal.close)
        self._thread.shutdown(wait=False)

    async def reserve(self, key: str, limits: Limits, asked: Amounts) -> Ticket:
        """Take it or raise RateLimited or BudgetSpent; QuotaUnavailable when it cannot be written down."""
        ticket = await self._memory.reserve(key, limits, asked)
        if not limits.is_any:
            self._dirty.set()
            return ticket
        written = self._next_commit()
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await asyncio.shield(written)
        except (JournalError, TimeoutError):
            if not self._fail_open:
                self.settle(ticket, Amounts())
                raise QuotaUnavailable(
                    "The budgets of keys cannot be written down at the moment; try again.", retry_after_seconds=5
                ) from None
        except asyncio.CancelledError:
            self.settle(ticket, Amounts())
            raise
        return ticket

    def settle(self, ticket: Ticket, actual: Amounts) -> None:
        """Replace what was reserved by what was used."""
        self._memory.settle(ticket, actual)
        self._dirty.set()

    async def standing(self, key: str, limits: Limits) -> tuple[Standing, ...]:
        """How the key stands in every window."""
        return await self._memory.standing(key, limits)

    def _next_commit(self) -> asyncio.Future[None]:
        """A commit of what has changed so far, at once, to be waited for."""
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
            # Its failure is reported once, here; who waits for it hears of it as well.
            self._batch.add_done_callback(lambda batch: batch.cancelled() or batch.exception())
        self._dirty.set()
        self._urgent.set()
        return self._batch

    async def _write_forever(self) -> None:
        while True:
            try:
                # Not wait_for: up to Python 3.11 it swallows a cancellation that comes together with the event.
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._dirty.wait()
            except TimeoutError:
                if not self._journal.is_synced:
                    await self._sync()
                continue
            await self._gather()
            await self._write()
            if self.is_failing:
                await asyncio.sleep(_RETRY_SECONDS)
                self._dirty.set()

    async def _gather(self) -> None:
        """Let more come together, unless somebody waits: until it is settled a reservation stands for the most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_SECONDS):
                await self._urgent.wait()

    async def _write(self) -> None:
        """One commit of everything that has changed."""
        self._dirty.clear()
        self._urgent.clear()
        ledger = self._memory.ledger
        changes, (batch, self._batch) = ledger.take_changes(), (self._batch, None)
        try:
            await self._commit(changes)
        except JournalError as error:
            ledger.put_back(changes)
            self._report(error)
            _end(batch, error)
        except asyncio.CancelledError:
            # Whether it was written is not known; written once more it is the same.
            ledger.put_back(changes)
            _end(batch, JournalError("the gateway is stopping"))
            raise
        else:
            self._report(None)
            _end(batch, None)

    async def _commit(self, changes: Mapping[Row, int]) -> None:
        mark = self._memory.clock.mark()
        try:
            await self._on_thread(lambda: self._journal.write(changes, mark))
        except JournalReplaced:
            everything = self._memory.ledger.everything()
            await self._on_thread(lambda: self._journal.write(everything, mark))

    async def _sync(self) -> None:
        try:
            await self._on_thread(self._journal.sync)
        except JournalError as error:
            self._report(error)

    def _report(self, error: JournalError | None) -> None:
        if error is not None and not self.is_failing:
            then = "keys are served from memory" if self._fail_open else "keys with limits are refused"
            _log.error("the quota file %s cannot be written (%s): %s until it can", self._path, error, then)
        if error is None and self.is_failing:
            _log.warning("the quota file %s can be written again", self._path)
        self.is_failing = error is not None

    async def _on_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _end(batch: asyncio.Future[None] | None, error: JournalError | None) -> None:
    if batch is None or batch.done():
        return
    if error is None:
        batch.set_result(None)
    else:
        batch.set_exception(error)
