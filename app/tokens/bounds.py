"""The most tokens that a text can be, by the kind of vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from app.tokens.source import CountSource


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
