"""What can be limited, and over how long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_MINUTE, _DAY = 60, 86_400


class Window(Enum):
    """A rolling window: ``seconds`` long, in buckets; what was used leaves it with its bucket.

    A day's buckets are a quarter of an hour, so that what was used comes back 23 h 45 min to 24 h later.
    """

    REQUESTS_PER_MINUTE = ("requests_per_minute", "requests", _MINUTE, 1)
    TOKENS_PER_MINUTE = ("tokens_per_minute", "tokens", _MINUTE, 1)
    REQUESTS_PER_DAY = ("requests_per_day", "requests", _DAY, 900)
    TOKENS_PER_DAY = ("tokens_per_day", "tokens", _DAY, 900)
    GPU_PER_DAY = ("gpu_seconds_per_day", "gpu_milliseconds", _DAY, 900)

    def __init__(self, label: str, unit: str, seconds: int, bucket_seconds: int) -> None:
        self.label = label
        self.unit = unit
        self.seconds = seconds
        self.bucket_seconds = bucket_seconds
        self.buckets = seconds // bucket_seconds

    @property
    def is_daily(self) -> bool:
        """Whether waiting for it is no plan."""
        return self.seconds >= _DAY

    def bucket(self, now: float) -> int:
        """The number of the bucket that the moment lies in."""
        return int(now // self.bucket_seconds)

    def leaves_at(self, bucket: int) -> float:
        """The moment from which on a bucket does not count any more."""
        return float((bucket + self.buckets) * self.bucket_seconds)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may use; None is no limit, 0 is nothing at all."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_per_day: int | None = None
    tokens_per_day: int | None = None
    gpu_seconds_per_day: int | None = None
    concurrent: int | None = None

    def of(self, window: Window) -> int | None:
        """The limit of a window in its unit."""
        limit: int | None = getattr(self, window.label)
        return limit * 1000 if limit is not None and window is Window.GPU_PER_DAY else limit

    @property
    def is_any(self) -> bool:
        """Whether anything is limited."""
        return self != _NO_LIMITS

    @property
    def counts_tokens(self) -> bool:
        """Whether a token more or less matters, so that prompts are to be counted exactly."""
        return self.tokens_per_minute is not None or self.tokens_per_day is not None


_NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Amounts:
    """What one request uses, never negative."""

    requests: int = 0
    tokens: int = 0
    gpu_milliseconds: int = 0

    def of(self, window: Window) -> int:
        """The amount that counts in a window."""
        amount: int = getattr(self, window.unit)
        return max(0, amount)
