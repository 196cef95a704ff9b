"""Counts of prompts by their beginnings: a conversation that grows costs only what is new."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from app.errors import RequestError
from app.tokens.source import RenderSource
from app.tokens.template import NASTY_TEXTS
from app.tokens.vocabulary import Vocabulary

_KEPT = 4096


class FragmentCounts:
    """Tokens of rendered prompts, cut at marks across which the tokenizer never merges.

    ``extra_tokens`` is what the engine adds to every prompt (BOS). Text before and after a special token is tokenized
    apart from each other (llama.cpp src/llama-vocab.cpp, tokenizer_st_partition), so that counts add up.
    """

    def __init__(self, source: RenderSource, *, marks: Sequence[str], extra_tokens: int = 0) -> None:
        self._source = source
        self._mark = re.compile("|".join(re.escape(mark) for mark in marks))
        self._extra_tokens = extra_tokens
        # Digest of a beginning, or of a tail → its tokens; the least recently used is forgotten.
        self._known: OrderedDict[bytes, int] = OrderedDict()

    async def count(self, rendered: str) -> int:
        """Tokens of a rendered prompt; asks the engine for the part after the longest known beginning."""
        beginnings = list(self._beginnings(rendered))
        known_end, tokens = 0, 0
        for end, digest in reversed(beginnings):
            if (found := self._recall(digest)) is not None:
                known_end, tokens = end, found
                break
        if not beginnings:
            return await self._count_tail(rendered) + self._extra_tokens
        last_end, last_digest = beginnings[-1]
        if last_end > known_end:
            tokens += await self._source.tokenize(rendered[known_end:last_end])
            self._remember(last_digest, tokens)
        return tokens + await self._count_tail(rendered[last_end:]) + self._extra_tokens

    async def count_apart(self, rendered: str) -> int:
        """The sum over all pieces, each asked for by itself: what cutting at every mark would make of it."""
        ends = [end for end, _ in self._beginnings(rendered)]
        pieces = [rendered[start:end] for start, end in zip([0, *ends], [*ends, len(rendered)], strict=True)]
        return sum([await self._source.tokenize(piece) for piece in pieces if piece]) + self._extra_tokens

    def _beginnings(self, rendered: str) -> Iterator[tuple[int, bytes]]:
        digest, start = hashlib.blake2b(b"beginning", digest_size=16), 0
        for match in self._mark.finditer(rendered):
            digest.update(rendered[start : match.end()].encode())
            start = match.end()
            yield start, digest.digest()

    async def _count_tail(self, text: str) -> int:
        if not text:
            return 0
        digest = hashlib.blake2b(b"tail" + text.encode(), digest_size=16).digest()
        if (found := self._recall(digest)) is not None:
            return found
        tokens = await self._source.tokenize(text)
        self._remember(digest, tokens)
        return tokens

    def _recall(self, digest: bytes) -> int | None:
        if digest in self._known:
            self._known.move_to_end(digest)
        return self._known.get(digest)

    def _remember(self, digest: bytes, tokens: int) -> None:
        self._known[digest] = tokens
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)


def _probes() -> Iterator[list[dict[str, Any]]]:
    for text in ("hello", *NASTY_TEXTS):
        yield [{"role": "user", "content": text}]
        turns = [
            ("user", text),
            ("assistant", text),
            ("user", f" {text}\n"),
            ("assistant", f"\n{text} "),
            ("user", text),
        ]
        yield [{"role": role, "content": content} for role, content in turns]


async def calibrate_fragments(source: RenderSource, vocabulary: Vocabulary) -> FragmentCounts | None:
    """Counts by fragments for this model, None unless they are the engine's own count for every probe."""
    try:
        marks = vocabulary.marks(await source.render(_body(next(_probes()))))
        if not marks:
            return None
        added: set[int] = set()
        counts = FragmentCounts(source, marks=marks)
        for probe in _probes():
            body = _body(probe)
            added.add(await source.count_chat(body) - await counts.count_apart(await source.render(body)))
    except RequestError:
        # The template refuses a probe.
        return None
    return FragmentCounts(source, marks=marks, extra_tokens=added.pop()) if len(added) == 1 else None


def _body(messages: list[dict[str, Any]]) -> bytes:
    return orjson.dumps({"messages": messages})
