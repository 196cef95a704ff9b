"""An event loop on which waiting takes no time: its clock jumps to the next timer.

A task that runs on and on without waiting for time would stop that clock; it is a failure with every task's place.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

# Far more passes of the loop than any moment needs.
_PASSES_OF_A_MOMENT = 20_000


class SpinError(AssertionError):
    """Tasks wake each other, or themselves, without end while no time passes."""


class _NoWait(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.passes = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("nothing will ever happen again")
        step = 0.0 if found or timeout is None else timeout
        self.now += step
        self.passes = 0 if step > 0 else self.passes + 1
        if self.passes > _PASSES_OF_A_MOMENT:
            self.passes = 0
            raise SpinError(f"no time passes at {self.now:.3f} s:\n{_places()}")
        return found


def _places() -> str:
    """Where every task stands, one a line, down to what it awaits."""
    return "\n".join(sorted(_place(task) for task in asyncio.all_tasks(asyncio.get_running_loop())))


def _place(task: asyncio.Task[Any]) -> str:
    frames, inner = [], task.get_coro()
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        frames.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        inner = getattr(inner, "cr_await", None)
    return f"{task.get_name()}: {' > '.join(frames)}"


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
