"""A request for text in whatever words it came, and the words in which its answer goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson

from app.errors import GatewayError
from app.protocol.answer import ChatAnswer
from app.protocol.chat import ChatRequest
from app.protocol.completion import CompletionRequest
from app.protocol.usage import Usage

TextRequest = ChatRequest | CompletionRequest
"""What is answered with generated text."""


class StreamRendering(Protocol):
    """Writes the engine's stream in the words of the client's API."""

    def feed(self, body: bytes) -> bytes:
        """What goes out for ``body``, a piece of the engine's stream cut anywhere between events."""

    def end(self, usage: Usage) -> bytes:
        """What goes out last, the engine having ended the answer as it should; raises GatewayError to break it off."""

    def failure(self, error: GatewayError) -> bytes:
        """The event that says why the stream breaks off."""


class Answer(Protocol):
    """Puts the engine's stream together to one document."""

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises EventTooLong, or ValueError for what is no chunk."""

    def body(self, usage: Usage) -> bytes:
        """The whole answer as JSON; raises GatewayError for one that must not go out."""


@dataclass(frozen=True, slots=True)
class Ask:
    """``endpoint`` is the name in the metrics; the makers get the prompt's tokens as admitted.

    With ``exact`` that number is the engine's own count, never a bound. ``content_type`` is that of a whole answer.
    ``is_verbatim`` says that the stream goes out as it came, but for what the meter takes away.
    """

    request: TextRequest
    endpoint: str
    new_stream: Callable[[int], StreamRendering]
    new_answer: Callable[[int], Answer]
    exact: bool = False
    content_type: bytes = b"application/json"
    is_verbatim: bool = False


class ChatStream:
    """OpenAI's chat stream is the engine's own, byte by byte."""

    def feed(self, body: bytes) -> bytes:
        """The same."""
        return body

    def end(self, usage: Usage) -> bytes:
        """Nothing: ``[DONE]`` has passed."""
        return b""

    def failure(self, error: GatewayError) -> bytes:
        """An ``error`` event without ``[DONE]`` behind it."""
        return error_event(error)


def error_event(error: GatewayError) -> bytes:
    """OpenAI's error object as an event of a stream."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


def ask_chat(request: ChatRequest) -> Ask:
    """A chat request of OpenAI's API."""
    return Ask(request, "chat", lambda _: ChatStream(), lambda _: ChatAnswer(), is_verbatim=True)
