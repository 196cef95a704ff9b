"""How far an open request is, for whoever looks at the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Where a request is on its way."""

    WAITING = "waiting"
    PROMPT = "prompt"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Progress:
    """One open request: tokens so far; ``prompt_limit_tokens`` is the whole prompt, 0 while it has not been counted."""

    model_id: str
    key: str
    phase: Phase
    slots: int
    prompt_tokens: int
    prompt_limit_tokens: int
    answer_tokens: int
