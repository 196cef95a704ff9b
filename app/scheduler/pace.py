"""How fast a model works off its queue, measured, so that who is sent away is told a time that holds."""

from __future__ import annotations

import math

from app.scheduler.demand import Demand

_SMOOTHING = 0.2
_FIRST_GUESS_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 60.0
# Answers are of all lengths; who comes a little late finds room, who comes early is sent away again.
_MARGIN = 1.2


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + _SMOOTHING * (now - before)


class Pace:
    """Rates of the last answers, and which part of what they reserved they used."""

    def __init__(self) -> None:
        self._prompt_rate: float | None = None
        self._answer_rate: float | None = None
        self._used_part: float | None = None
        # Times already promised to those who were sent away, by key; None is the whole queue.
        self._promised: dict[str | None, float] = {}

    def observe(self, *, prompt_tokens_per_second: float | None, answer_tokens_per_second: float | None) -> None:
        """Learn from one answer."""
        if prompt_tokens_per_second:
            self._prompt_rate = _smoothed(self._prompt_rate, prompt_tokens_per_second)
        if answer_tokens_per_second:
            self._answer_rate = _smoothed(self._answer_rate, answer_tokens_per_second)

    def used(self, demand: Demand, answer_tokens: int) -> None:
        """Learn how long answers are, compared with what is reserved for them."""
        if demand.answer_tokens:
            self._used_part = _smoothed(self._used_part, min(1.0, answer_tokens / demand.answer_tokens))

    def seconds(self, demand: Demand) -> float | None:
        """How long the engine will work on it; None before anything was measured."""
        if self._prompt_rate is None or self._answer_rate is None:
            return None
        part = 1.0 if self._used_part is None else self._used_part
        return demand.prompt_tokens / self._prompt_rate + part * demand.answer_tokens / self._answer_rate

    def promise(self, per_request_seconds: float | None, *, parallel: float, now: float, to: str | None) -> float:
        """Seconds after which there is room for one more who is sent away now, behind those sent away before."""
        if per_request_seconds is None:
            return _FIRST_GUESS_SECONDS
        self._promised[to] = max(self._promised.get(to, 0.0), now) + per_request_seconds / max(parallel, 0.01)
        wait = (self._promised[to] - now) * _MARGIN + per_request_seconds
        return min(math.ceil(wait), _LONGEST_RETRY_SECONDS)
