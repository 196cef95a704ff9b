"""What a request wants of an engine, and the rules of its queue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Urgency(IntEnum):
    """Which of a key's own requests goes first."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens of the prompt and of all answers as reserved, and what the key may ask for.

    ``weight`` is the key's share against other keys; ``deadline_seconds`` the longest time to wait; ``most_at_once``
    the most tokens that are in the engine at a time, where the request goes there in parts.
    """

    prompt_tokens: int = 0
    answer_tokens: int = 0
    weight: float = 1.0
    urgency: Urgency = Urgency.INTERACTIVE
    deadline_seconds: float | None = None
    most_at_once: int | None = None

    @property
    def tokens(self) -> int:
        """What the request costs its key; at least 1, so that turns are taken without any count."""
        return max(1, self.prompt_tokens + self.answer_tokens)

    @property
    def held_tokens(self) -> int:
        """What it takes of a pool that all slots share."""
        return self.tokens if self.most_at_once is None else min(self.tokens, self.most_at_once)


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of one model's queue; None is no limit.

    ``pool_tokens`` is the size of a KV cache that all slots share; a prompt of ``long_prompt_tokens`` or more is long,
    and at most ``long_prefills`` such prompts are read at a time.
    """

    max_queue_per_key: int | None = None
    pool_tokens: int | None = None
    long_prompt_tokens: int = 8192
    long_prefills: int | None = None
