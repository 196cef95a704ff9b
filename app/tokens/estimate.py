"""How many tokens a prompt has by guess, for a server that cannot count; never by a download."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import orjson

from app.errors import ModelFileError
from app.gguf import read_header

_log = logging.getLogger(__name__)

# What a chat template writes: around the whole (a default system prompt, the opening of the answer) and per message.
_TEMPLATE_TOKENS = 40
_MESSAGE_TOKENS = 8
# BOS, EOS, a prefix space.
_AROUND_TOKENS = 3
# What the larger projectors make of one picture.
_PICTURE_TOKENS = 1600
# What a chat template shows of a request besides its messages.
_RENDERED = ("tools", "response_format")
# Texts below this size are estimated on the event loop.
_SHORT_BYTES = 16_384

# Words by their capitals, digits, white space (a single one belongs to what follows it), and the rest one by one.
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]|\s+|[^A-Za-z0-9\s]")
_LETTERS_PER_TOKEN = 3.0
_CAPITALS_PER_TOKEN = 1.5
# A letter outside ASCII takes one token in common scripts, up to its bytes in rare ones.
_TOKENS_PER_FOREIGN_BYTE = 0.8
# Pre-tokenisers by their llama.cpp names (src/llama-vocab.cpp): how a text is cut before anything is merged.
_WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS: Mapping[str, str] = {
    "llama-bpe": _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"|\p{N}" + _REST,
    "gpt-2": _GPT2,
    "smollm": r"\p{N}|" + _GPT2,
    "starcoder": r"\p{N}|" + _GPT2,
}


@dataclass(frozen=True, slots=True)
class Estimator:
    """``tokens`` of a text by guess; the truth is at most ``margin`` (a part of it) above, as measured."""

    tokens: Callable[[str], int]
    margin: float


def guess_tokens(text: str) -> int:
    """Tokens of a text by its letters alone, as a small vocabulary would cut it."""
    return math.ceil(sum(map(_piece_tokens, _PIECES.findall(text))))


def _piece_tokens(piece: str) -> float:
    if not piece.isascii():
        return _TOKENS_PER_FOREIGN_BYTE * len(piece.encode("utf-8", "surrogatepass"))
    if piece.isalpha():
        return math.ceil(len(piece) / (_CAPITALS_PER_TOKEN if piece.isupper() else _LETTERS_PER_TOKEN))
    return 0 if piece == " " else 1


# Measured by tests/test_estimate.py against SmolLM2's vocabulary, one of the smallest in use (49,152 tokens): the worst
# are random letters, 12 % below the truth; English prose and code are 35 to 55 % above it.
BY_LETTERS = Estimator(guess_tokens, margin=0.15)


def by_vocabulary(path: Path) -> Estimator:
    """An estimator with the vocabulary of a model file; raises ModelFileError for one that is no byte-level BPE.

    Takes up to a second. Merges are ordered by what they make, where llama.cpp orders the pairs: the rare text whose
    parts can be merged in two ways may differ, hence an estimate.
    """
    names = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"}
    metadata = read_header(path, arrays=names).metadata
    tokens, merges = (metadata.get(name) for name in sorted(names, reverse=True))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or not isinstance(tokens, tuple) or not isinstance(merges, tuple):
        raise ModelFileError(
            f"{path} has no byte-level BPE vocabulary, so it cannot estimate prompts; leave out 'tokenizer'."
        )
    pattern = _PATTERNS.get(str(metadata.get("tokenizer.ggml.pre")), _PATTERNS["llama-bpe"])
    # Loaded for the first server that cannot count: it is of no use to anybody else.
    encoding = resolve_name("tiktoken:Encoding")(
        path.stem, pat_str=pattern, mergeable_ranks=_ranks([str(merge) for merge in merges]), special_tokens={}
    )
    return Estimator(lambda text: len(encoding.encode_ordinary(text)), margin=0.02)


def _ranks(merges: Sequence[str]) -> dict[bytes, int]:
    """What each merge makes, in the merges' order, after the 256 bytes."""
    letters = _byte_letters()
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merge in merges:
        made = bytes(letters[letter] for letter in merge.replace(" ", "") if letter in letters)
        ranks.setdefault(made, len(ranks))
    return ranks


def _byte_letters() -> dict[str, int]:
    """How GPT-2's vocabularies write bytes: printable ones as themselves, the others as letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class PromptEstimate:
    """Stands where an engine would that can count; what it says is a guess with its margin on top.

    What the server reports afterwards is held against it: a prompt that was underestimated raises all later ones.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._hidden_tokens = 0

    async def count_chat(self, body: bytes) -> int:
        """The most tokens that a chat body is likely to have, template and tools included."""
        if len(body) < _SHORT_BYTES:
            return self._estimate(body)
        return await asyncio.to_thread(self._estimate, body)

    async def learn(self, body: bytes, prompt_tokens: int) -> None:
        """What this body really had, by the server: a system prompt of its own shows here, or a worse vocabulary."""
        missing = prompt_tokens - await self.count_chat(body)
        if missing > 0:
            self._hidden_tokens += missing
            _log.info("a prompt had %d tokens more than estimated; later ones are taken for so much longer", missing)

    async def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The texts without any template, which is not known."""
        return "\n".join(_texts(messages))

    async def tokenize(self, text: str, *, special: bool = False) -> int:
        """The most tokens that a text is likely to have, with what is put around it when it is a ``special`` prompt."""
        tokens = self._estimator.tokens(text) * (1 + self._estimator.margin)
        return math.ceil(tokens) + (_AROUND_TOKENS if special else 0)

    def _estimate(self, body: bytes) -> int:
        document = orjson.loads(body)
        messages = document.get("messages", [])
        # Schemas and tools are rendered as JSON with spaces, whatever the client sent.
        rendered = [document[name] for name in _RENDERED if name in document]
        texts = [*_texts(messages), *(json.dumps(each, ensure_ascii=False) for each in rendered)]
        tokens = sum(self._estimator.tokens(text) for text in texts)
        tokens += _TEMPLATE_TOKENS + _MESSAGE_TOKENS * len(messages) + _PICTURE_TOKENS * _pictures(messages)
        return math.ceil(tokens * (1 + self._estimator.margin)) + self._hidden_tokens


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Every text of the messages; tool calls and their like as JSON."""
    for message in messages:
        for key, value in message.items():
            if isinstance(value, str):
                yield value
            elif key == "content" and isinstance(value, list):
                yield from (part["text"] for part in value if isinstance(part, dict) and "text" in part)
            elif value is not None:
                yield json.dumps(value, ensure_ascii=False)


def _pictures(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(1 for part in parts if isinstance(part, dict) and "text" not in part)
