"""An event loop on which waiting takes no time: its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _NoWait(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self.now += 0.0 if found or timeout is None else timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its ``time`` starts at 0."""

    def __init__(self) -> None:
        self._no_wait = _NoWait()
        super().__init__(self._no_wait)

    def time(self) -> float:
        return self._no_wait.now


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
