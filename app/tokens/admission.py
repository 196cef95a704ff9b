"""The verdict on a request: what it may use of its context, and what to tell the client about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.protocol import TextRequest
from app.tokens.trimming import ranges

# Above this part of the context the client is told that it is running out.
WARN_ABOVE = 0.8


class Overflow(StrEnum):
    """What becomes of a request that does not fit."""

    REJECT = "reject"
    CLAMP = "clamp"
    TRIM_OLDEST = "trim_oldest"


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that fits: its prompt in tokens (exact, or at most so many) and the limit that goes to the engine.

    ``request`` is what is to be sent: without the messages ``dropped``, if any had to go.
    ``longest_tokens`` is the longest of several prompts, each of which has a context of its own.
    """

    prompt_tokens: int
    exact: bool
    max_tokens: int
    clamped: bool
    context_tokens: int
    request: TextRequest
    dropped: tuple[int, ...] = ()
    is_estimate: bool = False
    longest_tokens: int | None = None

    @property
    def answer_tokens(self) -> int:
        """The longest that all answers together can be."""
        return self.max_tokens * self.request.choices

    @property
    def tokens(self) -> int:
        """What to reserve: the prompt once, and every answer at its longest."""
        return self.prompt_tokens + self.answer_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the request uses of its context; ``x-context-count: bound`` means at most so many prompt tokens.

        ``estimate``: nobody could count; the number is a guess with its margin.
        """
        prompt, limit = self.longest_tokens or self.prompt_tokens, self.context_tokens
        headers = [
            (b"x-context-limit", b"%d" % limit),
            (b"x-context-prompt-tokens", b"%d" % prompt),
            (b"x-context-remaining", b"%d" % (limit - prompt)),
            (b"x-context-count", b"estimate" if self.is_estimate else b"exact" if self.exact else b"bound"),
        ]
        if self.clamped:
            headers.append((b"x-context-clamped", b"%d" % self.max_tokens))
        if self.dropped:
            headers.append((b"x-context-trimmed", f"messages {ranges(self.dropped)}".encode()))
        if self.exact and prompt >= WARN_ABOVE * limit:
            headers.append((b"x-context-warning", b"the prompt uses %d%% of the context" % (100 * prompt // limit)))
        return headers
