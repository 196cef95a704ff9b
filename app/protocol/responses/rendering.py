"""The answer to a request of the Responses API: as a stream of events, or as one document."""

from __future__ import annotations

import orjson

from app.errors import GatewayError
from app.protocol.ask import Ask
from app.protocol.delta import DeltaReader
from app.protocol.responses.document import ResponseDocument
from app.protocol.responses.events import EventWriter
from app.protocol.responses.names import put_in_their_words
from app.protocol.responses.output import IN_PROGRESS, Output
from app.protocol.responses.request import ResponsesRequest
from app.protocol.usage import Usage


class ResponseStream:
    """Renders the engine's stream as events, ending in ``response.completed``, ``.incomplete`` or ``.failed``."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._document = ResponseDocument(request.parameters, request.chat.model)
        self._reader = DeltaReader()
        self._events = EventWriter()
        self._output = Output(self._document.identity, self._events)
        self._origins = request.origins
        self._begun = False

    def feed(self, body: bytes) -> bytes:
        """What goes out for ``body``; raises UpstreamFailed for what is no chunk."""
        deltas = self._reader.read(body)
        if deltas and not self._begun:
            self._begin()
        for delta in deltas:
            self._output.add(delta)
        return self._events.take()

    def _begin(self) -> None:
        self._begun = True
        self._document.model = self._reader.model or self._document.model
        for kind in ("response.created", "response.in_progress"):
            self._events.write(kind, response=self._document.of(IN_PROGRESS))

    def end(self, usage: Usage) -> bytes:
        """What is still open is closed, then the whole response."""
        self._output.close()
        response = self._document.ended(self._output, usage)
        self._events.write(f"response.{response['status']}", response=response)
        return self._events.take()

    def failure(self, error: GatewayError) -> bytes:
        """``response.failed`` with what there is, if the response had begun, then ``error``.

        The error is there twice: flat, as the API documents it, and under ``error``, as it is really sent and as
        OpenAI's SDKs want it in order to raise.
        """
        put_in_their_words(error, self._origins)
        if self._begun:
            self._events.write("response.failed", response=self._document.failed(self._output, error))
        details = error.body()["error"]
        flat = {key: details[key] for key in ("code", "message", "param")}
        self._events.write("error", **flat, error=details)
        return self._events.take()


class ResponseAnswer:
    """Collects the engine's stream to one response."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._document = ResponseDocument(request.parameters, request.chat.model)
        self._reader = DeltaReader()
        self._output = Output(self._document.identity)

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises UpstreamFailed for what is no chunk."""
        for delta in self._reader.read(body):
            self._output.add(delta)

    def body(self, usage: Usage) -> bytes:
        """The response as JSON."""
        self._document.model = self._reader.model or self._document.model
        self._output.close()
        return orjson.dumps(self._document.ended(self._output, usage))


def ask_response(request: ResponsesRequest) -> Ask:
    """A request of the Responses API."""
    return Ask(request.chat, "responses", lambda _: ResponseStream(request), lambda _: ResponseAnswer(request))
