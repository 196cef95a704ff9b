"""The gate of one loaded engine: bound, rendered bound, count; then fits, is shortened, or is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from app.errors import ContextLengthExceeded, CountingTimedOut, InvalidValue
from app.protocol import ChatRequest, CompletionRequest, Prompt, TextRequest
from app.tokens.admission import WARN_ABOVE, Admission, Overflow
from app.tokens.bounds import VocabularyBound, vocabulary_bound
from app.tokens.fragments import FragmentCounts, calibrate_fragments
from app.tokens.prompts import PromptSizes, Sizes
from app.tokens.source import CountSource, RenderSource
from app.tokens.template import TemplateBound, calibrate_template
from app.tokens.trimming import droppable, without
from app.tokens.vocabulary import Vocabulary

# Counting runs in the engine's HTTP threads and competes with its inference for the same cores.
_COUNTS_AT_ONCE = 2
_COUNT_DEADLINE_SECONDS = 10.0
# What needs room for an answer; every other text may fill its context.
_ANSWERED_FIELDS = frozenset({"messages", "prompt"})


@dataclass(frozen=True, slots=True)
class _Wish:
    """``answer_tokens`` is the client's limit, or what it gets without one."""

    answer_tokens: int
    is_limited: bool
    overflow: Overflow
    exact: bool


class TokenCounter:
    """Counts prompts for one loaded engine whose slots hold ``context_tokens`` each.

    ``rendering`` shows prompts as the engine tokenizes them; with it ``longest_token_bytes`` refuses at once what is
    far too long, and ``fragments`` counts only what is new. ``is_estimate``: the source cannot count, it guesses.
    """

    def __init__(
        self,
        source: CountSource,
        *,
        context_tokens: int,
        vocabulary: VocabularyBound | None,
        template: TemplateBound | None,
        rendering: RenderSource | None = None,
        longest_token_bytes: int | None = None,
        fragments: FragmentCounts | None = None,
        is_estimate: bool = False,
        vocabulary_size: int | None = None,
    ) -> None:
        self.context_tokens = context_tokens
        self.is_estimate = is_estimate
        self._source = source
        self._vocabulary = vocabulary
        self._template = template
        self._rendering = rendering
        self._longest_token_bytes = longest_token_bytes
        self._fragments = fragments
        self._prompts = PromptSizes(source, vocabulary=vocabulary, vocabulary_size=vocabulary_size)
        self._counting = asyncio.Semaphore(_COUNTS_AT_ONCE)

    def bound(self, request: ChatRequest) -> int | None:
        """The most prompt tokens that the request can have, without asking the engine; None when not known."""
        if self._vocabulary is None or self._template is None or not request.is_plain:
            return None
        rendered = self._template.rendered_bytes(messages=len(request.messages), content_bytes=request.content_bytes)
        return self._vocabulary.tokens(rendered)

    async def exact(self, request: ChatRequest) -> int:
        """Prompt tokens by the engine's own count; raises CountingTimedOut or what the engine says of the request."""
        async with self.in_time():
            return await self._source.count_chat(request.counting_body())

    async def count(self, request: ChatRequest) -> int:
        """The same number, by fragments where they are known to add up."""
        if self._rendering is None or self._fragments is None or request.media:
            return await self.exact(request)
        async with self.in_time():
            return await self._fragments.count(await self._rendering.render(request.counting_body()))

    async def admit(
        self,
        request: TextRequest,
        *,
        default_max_tokens: int,
        clamp: bool = False,
        overflow: Overflow | None = None,
        ceiling_tokens: int | None = None,
        exact: bool = False,
    ) -> Admission:
        """Decide whether prompt and answer fit a slot; raises ContextLengthExceeded with both numbers.

        Without a limit of the client's the answer gets ``default_max_tokens`` or what the context leaves, whichever is
        less: never an unlimited answer. No answer is longer than ``ceiling_tokens``; a client that wants more is
        refused with InvalidValue, or told of it when its answer may be shortened. ``exact`` always counts.
        """
        overflow = overflow or (Overflow.CLAMP if clamp else Overflow.REJECT)
        answer = request.max_tokens or default_max_tokens
        if ceiling_tokens is not None and answer > ceiling_tokens:
            if request.max_tokens is not None and overflow is Overflow.REJECT:
                raise InvalidValue(
                    f"'max_tokens' must not be over {ceiling_tokens} for this key and model.", param="max_tokens"
                )
            answer = ceiling_tokens
        wish = _Wish(answer, request.max_tokens is not None, overflow, exact)
        if isinstance(request, ChatRequest):
            admission = await self._admit(request, wish)
        else:
            admission = await self._admit_prompts(request, wish)
        if self.is_estimate:
            admission = replace(admission, exact=False, is_estimate=True)
        shortened = request.max_tokens is not None and admission.max_tokens < request.max_tokens
        return replace(admission, clamped=True) if shortened else admission

    def check(self, prompts: Sequence[Prompt], *, field: str) -> None:
        """Raises InvalidValue that names ``field`` for a token that the model does not have."""
        self._prompts.check(prompts, field=field)

    async def sizes(self, prompts: Sequence[Prompt], *, field: str, beside: int = 0, exact: bool = False) -> Sizes:
        """Tokens of texts that want no answer, each of which may fill a context with ``beside`` more tokens.

        Raises InvalidValue for a token that the model does not have, ContextLengthExceeded for what does not fit.
        """
        sizes = await self._prompt_sizes(prompts, _Wish(beside, False, Overflow.REJECT, exact), field=field)
        if sizes.longest + beside > self.context_tokens:
            raise self._too_long(sizes.longest + beside, None, field=field)
        return sizes

    async def _admit_prompts(self, request: CompletionRequest, wish: _Wish) -> Admission:
        """Each prompt has a context of its own, all of them are paid for."""
        sizes = await self._prompt_sizes(request.prompts, wish, field="prompt")
        admission = self._verdict(request, wish, sizes.longest, is_exact=sizes.exact)
        return replace(admission, prompt_tokens=sizes.total, longest_tokens=sizes.longest)

    async def _prompt_sizes(self, prompts: Sequence[Prompt], wish: _Wish, *, field: str) -> Sizes:
        self._prompts.check(prompts, field=field)
        bound = self._prompts.bound(prompts)
        if bound is not None and (bound.exact or self._settles(bound.longest, wish)):
            return bound
        size = max(len(prompt.encode()) for prompt in prompts if isinstance(prompt, str))
        self._refuse_by_size(size, max_tokens=None, field=field)
        async with self.in_time():
            return await self._prompts.count(prompts)

    async def _admit(self, request: ChatRequest, wish: _Wish) -> Admission:
        bound = self.bound(request)
        if bound is not None and self._settles(bound, wish):
            return Admission(bound, False, wish.answer_tokens, False, self.context_tokens, request)
        if wish.overflow is Overflow.TRIM_OLDEST:
            return await self._trimmed(request, wish)
        prompt, is_exact = await self._measure(request, wish)
        return self._verdict(request, wish, prompt, is_exact=is_exact)

    def _settles(self, bound: int, wish: _Wish) -> bool:
        """Whether a bound is enough to let it pass; close to the limit the client is owed the true number."""
        limit = self.context_tokens
        return not wish.exact and bound + wish.answer_tokens <= limit and bound < WARN_ABOVE * limit

    async def _measure(self, request: ChatRequest, wish: _Wish) -> tuple[int, bool]:
        """Prompt tokens and whether they are exact; raises ContextLengthExceeded for what cannot fit by its size."""
        if self._rendering is None or self._vocabulary is None or request.media:
            return await self.exact(request), True
        async with self.in_time():
            rendered = await self._rendering.render(request.counting_body())
        size = len(rendered.encode())
        bound = self._vocabulary.tokens(size)
        if self._settles(bound, wish):
            return bound, False
        self._refuse_by_size(size, max_tokens=request.max_tokens, field="messages")
        if self._fragments is None:
            return await self.exact(request), True
        async with self.in_time():
            return await self._fragments.count(rendered), True

    def _refuse_by_size(self, size_bytes: int, *, max_tokens: int | None, field: str) -> None:
        """Raises ContextLengthExceeded for what could not fit if it consisted of the longest token alone."""
        if self._longest_token_bytes is None:
            return
        least = -(-size_bytes // self._longest_token_bytes)
        if least > self.context_tokens:
            raise self._too_long(least, max_tokens, field=field, at_least=True)

    def _too_long(
        self, prompt: int, max_tokens: int | None, *, field: str, at_least: bool = False
    ) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            context_tokens=self.context_tokens,
            at_least=at_least,
            field=field,
            is_answered=field in _ANSWERED_FIELDS,
        )

    def _verdict(self, request: TextRequest, wish: _Wish, prompt: int, *, is_exact: bool) -> Admission:
        left = self.context_tokens - prompt
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        if left < 1:
            raise self._too_long(prompt, request.max_tokens, field=field)
        if wish.is_limited and wish.answer_tokens > left and wish.overflow is not Overflow.CLAMP:
            raise self._too_long(prompt, wish.answer_tokens, field=field)
        answer = min(wish.answer_tokens, left)
        return Admission(prompt, is_exact, answer, False, self.context_tokens, request)

    async def _trimmed(self, request: ChatRequest, wish: _Wish) -> Admission:
        """Drop the oldest turns until prompt and answer fit, as few as possible; raises when nothing more may go."""
        groups = droppable(request.messages)
        # Without a limit of its own the answer gets at least a quarter.
        room = wish.answer_tokens if wish.is_limited else min(wish.answer_tokens, self.context_tokens // 4)

        def shortened(count: int) -> tuple[ChatRequest, tuple[int, ...]]:
            dropped = tuple(index for group in groups[:count] for index in group)
            return (replace(request, messages=without(request.messages, dropped)) if dropped else request), dropped

        low, high, counts = 0, len(groups), dict[int, int]()
        while low <= high:
            middle = low if not counts else (low + high) // 2
            counts[middle] = await self.count(shortened(middle)[0])
            if counts[middle] + room <= self.context_tokens:
                high = middle - 1
            else:
                low = middle + 1
        fewest = min(low, len(groups))
        if fewest not in counts:
            counts[fewest] = await self.count(shortened(fewest)[0])
        shorter, dropped = shortened(fewest)
        return replace(self._verdict(shorter, wish, counts[fewest], is_exact=True), dropped=dropped)

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Ask the engine within the block: few at a time, and not for long; raises CountingTimedOut."""
        try:
            async with asyncio.timeout(_COUNT_DEADLINE_SECONDS), self._counting:
                yield
        except TimeoutError:
            raise CountingTimedOut(
                "The engine is too busy to count this prompt; try again.", retry_after_seconds=5
            ) from None


async def learn_counter(
    source: RenderSource,
    *,
    context_tokens: int,
    vocabulary_type: int,
    pre_tokenizer: str,
    vocabulary: Vocabulary | None,
    vocabulary_size: int | None = None,
) -> TokenCounter:
    """The counter of a loaded engine with everything that holds for its model, found out by asking it."""
    bound = await vocabulary_bound(source, vocabulary_type=vocabulary_type, pre_tokenizer=pre_tokenizer)
    return TokenCounter(
        source,
        context_tokens=context_tokens,
        vocabulary=bound,
        template=await calibrate_template(source) if bound is not None else None,
        rendering=source,
        longest_token_bytes=vocabulary.longest_token_bytes if vocabulary is not None else None,
        fragments=await calibrate_fragments(source, vocabulary) if vocabulary is not None else None,
        vocabulary_size=vocabulary_size,
    )
