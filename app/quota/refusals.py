"""The answers to a key that has used up what it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.errors import GatewayError, Overloaded, Unavailable
from app.quota.limits import Window

_LONGEST_RETRY_SECONDS = 60


class RateLimited(Overloaded):
    """The key has used up its minute or its concurrent requests; waiting helps."""


class TooLargeForLimit(RateLimited):
    """One request is over the key's limit all by itself; waiting does not help."""

    should_retry = False


class BudgetSpent(Overloaded):
    """The key has used up its day."""

    type = "insufficient_quota"
    code = "insufficient_quota"
    should_retry = False


class QuotaUnavailable(Unavailable):
    """Nobody can say what the key has used, and then it may use nothing (``quota.fail: closed``)."""

    code = "quota_unavailable"


@dataclass(frozen=True, slots=True)
class Excess:
    """Why a reservation is refused; ``free_in_seconds`` is None when it could never be granted."""

    window: Window
    limit: int
    spent: int
    wanted: int
    free_in_seconds: float | None

    def error(self, key: str) -> GatewayError:
        """The answer to the client."""
        window, scale = self.window, 1000 if self.window is Window.GPU_PER_DAY else 1
        limit, spent, wanted = (math.ceil(amount / scale) for amount in (self.limit, self.spent, self.wanted))
        about = f"The key {key!r} has {window.label} {limit}"
        if self.limit and self.free_in_seconds is None:
            return TooLargeForLimit(
                f"{about}, and this request alone may need {wanted}; ask for a shorter answer or send less."
            )
        if self.free_in_seconds is None:
            return BudgetSpent(f"{about}: it may not use this; ask the operator for more.")
        if window.is_daily:
            return BudgetSpent(
                f"{about}, of which {spent} are used or reserved, and this request may need {wanted}; "
                f"enough is free in {span(self.free_in_seconds)}."
            )
        seconds = min(math.ceil(self.free_in_seconds), _LONGEST_RETRY_SECONDS)
        return RateLimited(
            f"{about}, of which {spent} are used or reserved, and this request may need {wanted}; "
            f"try again in {seconds} s.",
            retry_after_seconds=max(1, seconds),
        )


def too_many_open(key: str, limit: int) -> GatewayError:
    """The answer to one request too many at a time."""
    if limit == 0:
        return BudgetSpent(f"The key {key!r} has concurrent 0: it may not use this; ask the operator for more.")
    return RateLimited(
        f"The key {key!r} has {limit} requests open, as many as it may; wait until one has ended.",
        retry_after_seconds=1,
    )


def span(seconds: float) -> str:
    """A time as OpenAI's headers write it: ``12ms``, ``1s``, ``6m0s``, ``2h0m0s``."""
    if seconds < 1:
        return f"{max(0, math.ceil(seconds * 1000))}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
