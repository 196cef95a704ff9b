"""OpenAI's Responses API in the words of the chat API, and back."""

from app.protocol.responses.names import put_in_their_words
from app.protocol.responses.rendering import ResponseAnswer, ResponseStream, ask_response
from app.protocol.responses.request import ResponsesRequest, parse_responses_request

__all__ = [
    "ResponseAnswer",
    "ResponseStream",
    "ResponsesRequest",
    "ask_response",
    "parse_responses_request",
    "put_in_their_words",
]
