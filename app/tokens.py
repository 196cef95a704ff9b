"""How many tokens is this prompt: a provable bound first, then the engine's exact count if that does not settle it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.errors import ContextLengthExceeded, CountingTimedOut, RequestError
from app.protocol import ChatRequest

# Counting runs in the engine's HTTP threads and competes with its inference for the same cores.
_COUNTS_AT_ONCE = 2
_COUNT_DEADLINE_SECONDS = 10.0


class CountSource(Protocol):
    """What an engine can say about a prompt."""

    async def count_chat(self, body: bytes) -> int:
        """Exact prompt tokens of a chat body, template and tools included."""

    async def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text that the model's template makes of these messages."""

    async def tokenize(self, text: str) -> int:
        """Tokens of a plain text, without BOS."""


@dataclass(frozen=True, slots=True)
class VocabularyBound:
    """Tokens ≤ ``per_byte`` × UTF-8 bytes of the rendered prompt + ``extra`` (BOS, EOS, a prefix space)."""

    per_byte: int
    extra: int

    def tokens(self, rendered_bytes: int) -> int:
        """The most tokens that so many bytes can be."""
        return self.per_byte * rendered_bytes + self.extra


# llama.cpp's vocab types: 1 SentencePiece with byte fallback, 2 byte-level BPE, 5 RWKV. Each symbol starts as at least
# one byte and merging only reduces (src/llama-vocab.cpp). WPM and UGM normalise the text to longer ones: no bound.
_BOUNDS = {1: VocabularyBound(1, 3), 2: VocabularyBound(1, 2), 5: VocabularyBound(1, 0)}
# Pre-tokenisers of BPE vocabularies that put a mark before every word.
_UNBOUNDED_PRE_TOKENIZERS = frozenset({"mmbert", "hybriddna", "whitespace"})


async def vocabulary_bound(source: CountSource, *, vocabulary_type: int, pre_tokenizer: str) -> VocabularyBound | None:
    """The bound of this vocabulary, or None when there is none that holds for every text."""
    bound = _BOUNDS.get(vocabulary_type)
    if bound is None or pre_tokenizer in _UNBOUNDED_PRE_TOKENIZERS:
        return None
    if vocabulary_type == 2 and await source.tokenize(" ") != 1:
        # Not byte-level: a space becomes the three bytes of U+2581.
        return VocabularyBound(3, 2)
    return bound


@dataclass(frozen=True, slots=True)
class TemplateBound:
    """Rendered bytes ≤ ``constant_bytes`` + ``message_bytes`` per message + bytes of the contents, plus a margin."""

    constant_bytes: int
    message_bytes: int

    def rendered_bytes(self, *, messages: int, content_bytes: int) -> int:
        """The most bytes that the template makes; calibration is evidence, not proof, hence 2 % + 64."""
        exact = self.constant_bytes + self.message_bytes * messages + content_bytes
        return exact + exact // 50 + 64


_NASTY = (
    "",
    " leading and trailing ",
    "\"quotes\" 'and' \\backslashes\\ \n\nnewlines\t<&>",
    "北京🌍é",
    "<|im_start|>system\n<|im_end|><s>[INST]<think></think><tool_call>{{ x }}{% y %}",
    "# " * 200,
)


async def calibrate_template(source: CountSource) -> TemplateBound | None:
    """Measure what the template adds per message; None when it does more than add (then every prompt is counted)."""
    try:
        return await _measured_template(source)
    except RequestError:
        # It refuses a system message, an empty one, …
        return None


async def _measured_template(source: CountSource) -> TemplateBound | None:
    async def overhead(*turns: tuple[str, str]) -> int:
        rendered = await source.render_chat([{"role": role, "content": content} for role, content in turns])
        return len(rendered.encode()) - sum(len(content.encode()) for _, content in turns)

    user, assistant, system = ("user", "hello"), ("assistant", "hi"), ("system", "be brief")
    constant = await overhead(user)
    pair = await overhead(user, assistant, user) - constant
    per_message = max(pair, await overhead(system, user) - constant, 0)
    bound = TemplateBound(constant_bytes=constant, message_bytes=per_message)

    probes = [(user, assistant) * turns + (user,) for turns in (2, 5)]
    probes += [(system, *probe) for probe in probes]
    for text in _NASTY:
        # Repeated, so that no expansion of a character hides behind what the template adds per message.
        text *= 100
        probes += [(("user", text),), (("system", text), ("user", text), ("assistant", text), ("user", text))]
    for probe in probes:
        if await overhead(*probe) > constant + per_message * len(probe):
            return None
    return bound


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that fits: its prompt in tokens (exact, or at most so many) and the limit that goes to the engine."""

    prompt_tokens: int
    exact: bool
    max_tokens: int
    clamped: bool
    context_tokens: int


class TokenCounter:
    """Counts prompts for one loaded engine whose slots hold ``context_tokens`` each."""

    def __init__(
        self,
        source: CountSource,
        *,
        context_tokens: int,
        vocabulary: VocabularyBound | None,
        template: TemplateBound | None,
    ) -> None:
        self.context_tokens = context_tokens
        self._source = source
        self._vocabulary = vocabulary
        self._template = template
        self._counting = asyncio.Semaphore(_COUNTS_AT_ONCE)

    def bound(self, request: ChatRequest) -> int | None:
        """The most prompt tokens that the request can have, without asking the engine; None when not known."""
        if self._vocabulary is None or self._template is None or not request.is_plain:
            return None
        rendered = self._template.rendered_bytes(messages=len(request.messages), content_bytes=request.content_bytes)
        return self._vocabulary.tokens(rendered)

    async def exact(self, request: ChatRequest) -> int:
        """Prompt tokens by the engine's own count; raises CountingTimedOut or what the engine says of the request."""
        try:
            async with asyncio.timeout(_COUNT_DEADLINE_SECONDS), self._counting:
                return await self._source.count_chat(request.counting_body())
        except TimeoutError:
            raise CountingTimedOut(
                "The engine is too busy to count this prompt; try again.", retry_after_seconds=5
            ) from None

    async def admit(self, request: ChatRequest, *, default_max_tokens: int, clamp: bool) -> Admission:
        """Decide whether prompt and answer fit a slot; raises ContextLengthExceeded with both numbers.

        Without a limit of the client's the answer gets ``default_max_tokens`` or what the context leaves, whichever is
        less: never an unlimited answer.
        """
        wanted = request.max_tokens or default_max_tokens
        bound = self.bound(request)
        if bound is not None and bound + wanted <= self.context_tokens:
            return Admission(bound, False, wanted, False, self.context_tokens)
        prompt = await self.exact(request)
        left = self.context_tokens - prompt
        if left < 1:
            raise ContextLengthExceeded(
                prompt_tokens=prompt, max_tokens=request.max_tokens, context_tokens=self.context_tokens
            )
        if request.max_tokens is not None and wanted > left and not clamp:
            raise ContextLengthExceeded(prompt_tokens=prompt, max_tokens=wanted, context_tokens=self.context_tokens)
        clamped = request.max_tokens is not None and wanted > left
        return Admission(prompt, True, min(wanted, left), clamped, self.context_tokens)
