"""Fill in the middle, in llama-server's words: what goes between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from app.errors import InvalidValue
from app.protocol.ask import Ask
from app.protocol.completion import CompletionRequest, completion_request
from app.protocol.fields import MAX_INTEGER, integer
from app.protocol.native import ask_native

_MAX_TEXT_BYTES = 1 << 20
_MAX_SNIPPETS = 128

MARKS: Sequence[tuple[str, str, str]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek's own letters
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""How models write what stands before prefix, suffix and middle (llama.cpp src/llama-vocab.cpp)."""
PROJECT_MARKS: Sequence[str] = ("<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>")
FILE_MARKS: Sequence[str] = ("<|file_sep|>", "<file_sep>")
"""How models that know several files write what stands before the names of the project and of each file."""


class Snippet(NamedTuple):
    """A piece of another file, which the middle may have to fit."""

    file: str
    text: str


@dataclass(frozen=True, slots=True)
class InfillRequest:
    """One parsed request; ``completion`` is what is asked of the engine once the tokens are known.

    One that ``only_reads`` (``n_predict`` 0) wants the prompt in the cache and no text: editors send it ahead.
    """

    prefix: str
    suffix: str
    snippets: tuple[Snippet, ...]
    only_reads: bool
    completion: CompletionRequest

    def with_tokens(self, tokens: list[int]) -> CompletionRequest:
        """The request for what follows these tokens: marks, prefix and suffix, whole."""
        return replace(self.completion, prompts=(tokens,))


def infill_request(document: Mapping[str, Any]) -> InfillRequest:
    """Check a body of ``/infill``; raises RequestError or InvalidValue."""
    prefix, suffix = (_text(document, name) for name in ("input_prefix", "input_suffix"))
    if not prefix and not suffix:
        raise InvalidValue("'input_prefix' and 'input_suffix' are both empty.", param="input_prefix")
    limit = integer(document, "n_predict", low=0, high=MAX_INTEGER)
    # The engine writes one token at least.
    names = {"prompt": "-", **({} if limit is None else {"max_tokens": max(1, limit)})}
    completion = completion_request({**document, **names, "n": None})
    return InfillRequest(prefix + _text(document, "prompt"), suffix, _snippets(document), limit == 0, completion)


def ask_infill(request: InfillRequest, tokens: list[int]) -> Ask:
    """The request whose answer goes out in llama-server's own words."""
    return ask_native(request.with_tokens(tokens), "infill", is_silent=request.only_reads)


def _snippets(document: Mapping[str, Any]) -> tuple[Snippet, ...]:
    entries = document.get("input_extra") or []
    if not isinstance(entries, list) or len(entries) > _MAX_SNIPPETS:
        raise InvalidValue(f"'input_extra' must be an array of at most {_MAX_SNIPPETS} snippets.", param="input_extra")
    snippets = tuple(_snippet(entry) for entry in entries)
    if sum(len(part.encode()) for snippet in snippets for part in snippet) > _MAX_TEXT_BYTES:
        raise InvalidValue(f"'input_extra' must hold at most {_MAX_TEXT_BYTES} bytes of text.", param="input_extra")
    return snippets


def _snippet(entry: Any) -> Snippet:
    text = entry.get("text") if isinstance(entry, dict) else None
    file = entry.get("filename", "") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not isinstance(file, str):
        raise InvalidValue("An entry of 'input_extra' is an object with 'text' and 'filename'.", param="input_extra")
    return Snippet(file, text)


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if value is not None and (not isinstance(value, str) or len(value.encode()) > _MAX_TEXT_BYTES):
        raise InvalidValue(f"'{name}' must be a string of at most {_MAX_TEXT_BYTES} bytes.", param=name)
    return value or ""
