"""What the model file says of its tokens: the longest, and those that nothing is merged across."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.gguf import read_header

_TOKENS, _TYPES, _MODEL = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.model"
# llama.cpp's token types: 3 control, 4 user-defined; both are cut out of a text before anything is merged.
_SPECIAL = frozenset({3, 4})
_CONTROL = 3
# How vocabularies write a space; it is one byte of the text. Any other letter is taken at its full length: never less.
_SPACES: Mapping[str, str] = {"gpt2": "Ġ", "llama": "\u2581"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``longest_token_bytes`` is never below the truth; ``control`` and ``specials`` are texts of special tokens."""

    longest_token_bytes: int
    control: frozenset[str]
    specials: frozenset[str]

    def marks(self, rendered: str) -> tuple[str, ...]:
        """Control tokens of a rendered prompt at whose end it may be cut: no other special token overlaps them."""
        present = sorted(token for token in self.control if len(token) > 2 and token in rendered)
        return tuple(token for token in present if not any(_overlap(token, other) for other in self.specials))


def _overlap(token: str, other: str) -> bool:
    if token == other:
        return False
    if token in other:
        return True
    shorter = min(len(token), len(other))
    return any(other.endswith(token[:size]) or token.endswith(other[:size]) for size in range(1, shorter))


def read_vocabulary(path: Path) -> Vocabulary | None:
    """The vocabulary in a model file, None when it holds none; takes up to a second, so not on the event loop."""
    metadata = read_header(path, arrays={_TOKENS, _TYPES}).metadata
    tokens, types = metadata.get(_TOKENS), metadata.get(_TYPES)
    if not isinstance(tokens, tuple) or not isinstance(types, tuple):
        return None
    texts = [str(token) for token in tokens]
    space = _SPACES.get(str(metadata.get(_MODEL)), " ")
    kinds = list(zip(texts, types, strict=False))
    return Vocabulary(
        longest_token_bytes=max((len(text.replace(space, " ").encode()) for text in texts), default=1) or 1,
        control=frozenset(text for text, kind in kinds if kind == _CONTROL),
        specials=frozenset(text for text, kind in kinds if kind in _SPECIAL and text),
    )
