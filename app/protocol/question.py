"""A request that the engine answers at once, with numbers instead of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from app.protocol.call import Call
from app.protocol.prompts import Prompt


class Part(NamedTuple):
    """What the engine answered to the inputs from ``start`` on."""

    start: int
    document: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens that it has read, by its own count; raises KeyError, TypeError or ValueError for no answer."""
        return int(self.document["usage"]["prompt_tokens"])


class Question(Call, Protocol):
    """Texts that are each computed for themselves, so that they may go to the engine a few at a time.

    ``endpoint`` is its name in the metrics; ``beside`` is what goes with each of the inputs.
    """

    @property
    def endpoint(self) -> str: ...

    @property
    def inputs(self) -> Sequence[Prompt]: ...

    @property
    def beside(self) -> Prompt | None: ...

    def part(self, start: int, end: int) -> dict[str, Any]:
        """What the engine gets for these inputs."""

    def answer(self, parts: Sequence[Part], *, model_id: str) -> bytes:
        """The whole answer; raises KeyError, TypeError or ValueError for parts that are none."""
