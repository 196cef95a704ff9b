"""How many tokens are texts that go to the engine as they are, without a template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import InvalidValue
from app.protocol import Prompt
from app.tokens.bounds import VocabularyBound
from app.tokens.source import CountSource


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of several prompts; ``exact`` or at most so many."""

    tokens: tuple[int, ...]
    exact: bool

    @property
    def total(self) -> int:
        """Of all together."""
        return sum(self.tokens)

    @property
    def longest(self) -> int:
        """Of the longest."""
        return max(self.tokens)


class PromptSizes:
    """Bounds and counts of raw prompts; ``vocabulary_size`` is how many different tokens the engine knows."""

    def __init__(self, source: CountSource, *, vocabulary: VocabularyBound | None, vocabulary_size: int | None) -> None:
        self._source = source
        self._vocabulary = vocabulary
        self._vocabulary_size = vocabulary_size

    def check(self, prompts: Sequence[Prompt], *, field: str) -> None:
        """Raises InvalidValue that names ``field`` for a token that the model does not have."""
        size = self._vocabulary_size
        if size is None:
            return
        for prompt in prompts:
            if not isinstance(prompt, str) and (unknown := max(prompt, default=0)) >= size:
                raise InvalidValue(
                    f"'{field}' has the token {unknown}; this model's tokens go from 0 to {size - 1}.", param=field
                )

    def bound(self, prompts: Sequence[Prompt]) -> Sizes | None:
        """The most tokens that they can be, without asking the engine; None when not known."""
        if all(not isinstance(prompt, str) for prompt in prompts):
            return Sizes(tuple(len(prompt) for prompt in prompts), exact=True)
        bound = self._vocabulary
        if bound is None:
            return None
        return Sizes(
            tuple(bound.tokens(len(prompt.encode())) if isinstance(prompt, str) else len(prompt) for prompt in prompts),
            exact=False,
        )

    async def count(self, prompts: Sequence[Prompt]) -> Sizes:
        """Their tokens by the engine's own count: BOS and EOS where the model has them; a token list as it is."""
        return Sizes(tuple([await self._count(prompt) for prompt in prompts]), exact=True)

    async def _count(self, prompt: Prompt) -> int:
        return await self._source.tokenize(prompt, special=True) if isinstance(prompt, str) else len(prompt)
