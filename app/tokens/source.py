"""The seam: what an engine can say about a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class CountSource(Protocol):
    """What an engine can say about a prompt."""

    async def count_chat(self, body: bytes) -> int:
        """Exact prompt tokens of a chat body, template and tools included."""

    async def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text that the model's template makes of these messages."""

    async def tokenize(self, text: str, *, special: bool = False) -> int:
        """Tokens of a text; with ``special`` as the engine counts a whole prompt, BOS and EOS included."""


class RenderSource(CountSource, Protocol):
    """An engine that shows the prompt it makes of a request."""

    async def render(self, body: bytes) -> str:
        """The prompt text of a chat body, template and tools included, as the engine would tokenize it."""
