"""Anthropic's Messages API in terms of a chat: the request one way, stream, document and errors the other."""

from app.protocol.messages.answer import MessageAnswer
from app.protocol.messages.ask import ask_messages, count_document
from app.protocol.messages.faults import error_document, is_messages_path
from app.protocol.messages.models import model_info, model_page
from app.protocol.messages.request import MessagesRequest, parse_messages_request
from app.protocol.messages.stream import MessageStream

__all__ = [
    "MessageAnswer",
    "MessageStream",
    "MessagesRequest",
    "ask_messages",
    "count_document",
    "error_document",
    "is_messages_path",
    "model_info",
    "model_page",
    "parse_messages_request",
]
