"""A messages request as something that can be asked."""

from __future__ import annotations

import orjson

from app.protocol.ask import Ask
from app.protocol.messages.answer import MessageAnswer
from app.protocol.messages.request import MessagesRequest
from app.protocol.messages.stream import MessageStream


def ask_messages(request: MessagesRequest) -> Ask:
    """The prompt is counted exactly where a stream has to begin with its tokens."""
    stops, shows_thinking = request.stops, request.shows_thinking
    return Ask(
        request.chat,
        "messages",
        lambda prompt_tokens: MessageStream(input_tokens=prompt_tokens, stops=stops, shows_thinking=shows_thinking),
        lambda _: MessageAnswer(stops=stops, shows_thinking=shows_thinking),
        exact=request.chat.stream,
    )


def count_document(tokens: int) -> bytes:
    """The answer of ``/v1/messages/count_tokens``."""
    return orjson.dumps({"input_tokens": tokens})
