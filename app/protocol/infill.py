"""Fill in the middle, in llama-server's words: what goes between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from app.errors import GatewayError, InvalidValue
from app.protocol.ask import Ask, error_event
from app.protocol.completion import CompletionRequest, completion_request
from app.protocol.fields import MAX_INTEGER, integer
from app.protocol.sse import SSESplitter, event_data
from app.protocol.usage import Usage

_MAX_TEXT_BYTES = 1 << 20

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


@dataclass(frozen=True, slots=True)
class InfillRequest:
    """One parsed request; ``completion`` is what is asked of the engine once the tokens are known."""

    prefix: str
    suffix: str
    completion: CompletionRequest

    def with_tokens(self, tokens: list[int]) -> CompletionRequest:
        """The request for what follows these tokens: marks, prefix and suffix, whole."""
        return replace(self.completion, prompts=(tokens,))


def infill_request(document: Mapping[str, Any]) -> InfillRequest:
    """Check a body of ``/infill``; raises RequestError or InvalidValue."""
    if document.get("input_extra"):
        raise InvalidValue("'input_extra' is not supported; put it into 'input_prefix'.", param="input_extra")
    prefix, suffix = (_text(document, name) for name in ("input_prefix", "input_suffix"))
    if not prefix and not suffix:
        raise InvalidValue("'input_prefix' and 'input_suffix' are both empty.", param="input_prefix")
    limit = integer(document, "n_predict", low=1, high=MAX_INTEGER)
    names = {"prompt": "-", **({} if limit is None else {"max_tokens": limit})}
    completion = completion_request({**document, **names, "n": None})
    return InfillRequest(prefix + _text(document, "prompt"), suffix, completion)


def ask_infill(request: CompletionRequest) -> Ask:
    """The request whose answer goes out in llama-server's own words."""
    return Ask(request, "infill", lambda _: InfillStream(), lambda _: InfillAnswer(request.model))


class _Pieces:
    """Reads the texts out of the engine's chunks, and why they ended."""

    def __init__(self) -> None:
        self._splitter = SSESplitter()
        self.is_cut = False

    def read(self, body: bytes) -> str:
        return "".join(map(self._piece, self._splitter.feed(body)))

    def _piece(self, event: bytes) -> str:
        data = event_data(event)
        if not data or data.strip() in (b"[DONE]", b"null"):
            return ""
        try:
            (choice,) = orjson.loads(data)["choices"] or [{}]
            self.is_cut = self.is_cut or choice.get("finish_reason") == "length"
            return str(choice.get("text") or "")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("the engine sent an event that is not a chunk") from error

    def ending(self, usage: Usage) -> dict[str, Any]:
        return {
            "stop": True,
            "stop_type": "limit" if self.is_cut else "eos",
            # Nothing of the prompt ever is.
            "truncated": False,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
        }


class InfillStream:
    """llama-server's stream: texts, at last one with ``stop``, no ``[DONE]``."""

    def __init__(self) -> None:
        self._pieces = _Pieces()

    def feed(self, body: bytes) -> bytes:
        """The texts in ``body``."""
        text = self._pieces.read(body)
        return _event({"content": text, "stop": False}) if text else b""

    def end(self, usage: Usage) -> bytes:
        """The last event."""
        return _event({"content": "", **self._pieces.ending(usage)})

    def failure(self, error: GatewayError) -> bytes:
        """An ``error`` event."""
        return error_event(error)


class InfillAnswer:
    """llama-server's document."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._pieces = _Pieces()
        self._texts: list[str] = []

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises EventTooLong, or ValueError for what is no chunk."""
        self._texts.append(self._pieces.read(body))

    def body(self, usage: Usage) -> bytes:
        """The whole answer as JSON."""
        content = {"content": "".join(self._texts), "model": self._model}
        return orjson.dumps(content | self._pieces.ending(usage))


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if value is not None and (not isinstance(value, str) or len(value.encode()) > _MAX_TEXT_BYTES):
        raise InvalidValue(f"'{name}' must be a string of at most {_MAX_TEXT_BYTES} bytes.", param=name)
    return value or ""


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"
