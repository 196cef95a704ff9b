"""Answers that are looked through before they are passed off as what was asked for."""

from __future__ import annotations

from app.errors import AnswerRejected, GatewayError
from app.protocol.answer import ChatAnswer
from app.protocol.ask import Answer, Ask, StreamRendering
from app.protocol.expectation import Expectation
from app.protocol.usage import Usage

_DONE = b"data: [DONE]\n\n"


def checked(ask: Ask) -> Ask:
    """The same, with what the request expects of its answer held against it; nothing changes without expectations."""
    wanted = ask.request.expectation
    if not wanted:
        return ask
    return Ask(
        ask.request,
        ask.endpoint,
        lambda tokens: _CheckedStream(ask.new_stream(tokens), wanted),
        lambda tokens: _CheckedAnswer(ask.new_answer(tokens), wanted),
        exact=ask.exact,
    )


class _Check:
    def __init__(self, wanted: Expectation) -> None:
        self._wanted = wanted
        self._answer = ChatAnswer()

    def feed(self, body: bytes) -> None:
        self._answer.feed(body)

    def require(self) -> None:
        for choice in self._answer.choices:
            if (problem := self._wanted.problem(choice)) is not None:
                raise AnswerRejected(f"The answer cannot be used: {problem}. Try again, or ask another model.")


class _CheckedAnswer:
    def __init__(self, inner: Answer, wanted: Expectation) -> None:
        self._inner = inner
        self._check = _Check(wanted)

    def feed(self, body: bytes) -> None:
        self._check.feed(body)
        self._inner.feed(body)

    def body(self, usage: Usage) -> bytes:
        self._check.require()
        return self._inner.body(usage)


class _CheckedStream:
    """Holds ``[DONE]`` back until the answer has been looked at: what came before it has long been sent."""

    def __init__(self, inner: StreamRendering, wanted: Expectation) -> None:
        self._inner = inner
        self._check = _Check(wanted)
        self._done = b""

    def feed(self, body: bytes) -> bytes:
        self._check.feed(body)
        if body.endswith(_DONE):
            self._done, body = _DONE, body.removesuffix(_DONE)
        return self._inner.feed(body) if body else b""

    def end(self, usage: Usage) -> bytes:
        self._check.require()
        return self._inner.feed(self._done) + self._inner.end(usage)

    def failure(self, error: GatewayError) -> bytes:
        return self._inner.failure(error)
