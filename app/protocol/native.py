"""Generated text in llama-server's own words, and its own request to go on with a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.errors import GatewayError, InvalidValue
from app.protocol.ask import Ask, error_event
from app.protocol.completion import CompletionRequest, completion_request
from app.protocol.fields import MAX_INTEGER, integer
from app.protocol.sse import SSESplitter, event_data
from app.protocol.usage import Usage

_NO_LIMIT = -1
# They would change the answer, so that passing over them would be a lie.
_NOT_THERE = ("grammar", "json_schema", "n_probs", "image_data", "lora", "t_max_predict_ms", "n_indent")


def native_request(document: Mapping[str, Any]) -> CompletionRequest:
    """Check a body of llama-server's ``/completion``; raises RequestError or InvalidValue."""
    for name in _NOT_THERE:
        if document.get(name):
            raise InvalidValue(f"'{name}' is not supported here; use /v1/chat/completions.", param=name)
    limit = integer(document, "n_predict", low=_NO_LIMIT, high=MAX_INTEGER)
    if limit == 0:
        raise InvalidValue("'n_predict' must be at least 1, or -1 for the model's own limit.", param="n_predict")
    request = completion_request({**document, "max_tokens": None if limit == _NO_LIMIT else limit, "n": None})
    if len(request.prompts) > 1:
        raise InvalidValue("'prompt' must be one text here; /v1/completions takes several.", param="prompt")
    return request


def ask_native(request: CompletionRequest, endpoint: str, *, is_silent: bool = False) -> Ask:
    """The request whose answer goes out in llama-server's own words; without any text if it ``is_silent``."""
    return Ask(request, endpoint, lambda _: NativeStream(is_silent), lambda _: NativeAnswer(request.model, is_silent))


class _Pieces:
    """Reads the texts out of the engine's chunks, unless nobody wants them, and why they ended."""

    def __init__(self, is_silent: bool) -> None:
        self._splitter = SSESplitter()
        self._is_silent = is_silent
        self.is_cut = False

    def read(self, body: bytes) -> str:
        text = "".join(map(self._piece, self._splitter.feed(body)))
        return "" if self._is_silent else text

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


class NativeStream:
    """llama-server's stream: texts, at last one with ``stop``, no ``[DONE]``."""

    def __init__(self, is_silent: bool) -> None:
        self._pieces = _Pieces(is_silent)

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


class NativeAnswer:
    """llama-server's document."""

    def __init__(self, model: str, is_silent: bool) -> None:
        self._model = model
        self._pieces = _Pieces(is_silent)
        self._texts: list[str] = []

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises EventTooLong, or ValueError for what is no chunk."""
        self._texts.append(self._pieces.read(body))

    def body(self, usage: Usage) -> bytes:
        """The whole answer as JSON."""
        content = {"content": "".join(self._texts), "model": self._model}
        return orjson.dumps(content | self._pieces.ending(usage))


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"
