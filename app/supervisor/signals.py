"""How a load or a wait ends other than by its result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from app.engine.process import EngineExit

_T = TypeVar("_T")


class UnitRetired(Exception):
    """The configuration has another unit for this model, or none any more."""


class NoLongerWanted(Exception):
    """Everybody who wanted the model has left before its load began."""


class GaveUp(Exception):
    """The engine ended too often, or for a reason that will not change by itself."""

    def __init__(self, exit: EngineExit, retry_seconds: float) -> None:
        super().__init__(exit.sentence)
        self.exit = exit
        self.retry_seconds = retry_seconds


async def unless(stop: asyncio.Event, work: Awaitable[_T]) -> _T | None:
    """The result of ``work``, or None when it was given up because of ``stop``."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
