"""Transcriptions: a recording in, its words out, as one chat request to a model that hears."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import AnswerRejected, GatewayError, InvalidValue
from app.protocol.ask import Ask, error_event
from app.protocol.chat import ChatRequest, chat_request
from app.protocol.delta import DeltaReader
from app.protocol.usage import Usage

_FORMATS = ("json", "text")
# What llama-server says to the model on its own route.
_INSTRUCTION = "Transcribe audio to text"


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """``chat`` is what the model is asked; ``is_bare`` wants the words alone, not JSON."""

    chat: ChatRequest
    is_bare: bool


def transcription_request(fields: Mapping[str, str], recording: bytes) -> TranscriptionRequest:
    """Check the fields of a form; raises InvalidValue."""
    kind = fields.get("response_format") or _FORMATS[0]
    if kind not in _FORMATS:
        raise InvalidValue("'response_format' must be json or text.", param="response_format")
    instruction = fields.get("prompt") or _INSTRUCTION
    if language := fields.get("language"):
        instruction += f" (language: {language})"
    data = base64.b64encode(recording).decode("ascii")
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": _format(recording)}}
    content = [audio, {"type": "text", "text": instruction}]
    document = {
        "model": fields.get("model"),
        "messages": [{"role": "user", "content": content}],
        "temperature": _temperature(fields.get("temperature")),
        "stream": _truth(fields.get("stream")),
    }
    return TranscriptionRequest(chat_request(document), kind == "text")


def ask_transcription(request: TranscriptionRequest) -> Ask:
    """The request whose answer goes out as a transcript."""
    return Ask(
        request.chat,
        "transcriptions",
        lambda _: TranscriptStream(),
        lambda _: TranscriptAnswer(is_bare=request.is_bare),
        content_type=b"text/plain; charset=utf-8" if request.is_bare else b"application/json",
    )


class _Words:
    def __init__(self) -> None:
        self._reader = DeltaReader()
        self._texts: list[str] = []
        self._is_cut = False

    def read(self, body: bytes) -> str:
        deltas = self._reader.read(body)
        self._is_cut = self._is_cut or any(delta.finish_reason == "length" for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        self._texts.append(text)
        return text

    def whole(self) -> str:
        """All of it; raises AnswerRejected for a transcript that was cut, which its reader could not see."""
        if self._is_cut:
            raise AnswerRejected(
                "The transcript is longer than an answer of this model may be; send a shorter recording, "
                "or have max_tokens of the model raised."
            )
        return "".join(self._texts)


class TranscriptStream:
    """OpenAI's events of a transcript."""

    def __init__(self) -> None:
        self._words = _Words()

    def feed(self, body: bytes) -> bytes:
        """The words in ``body``."""
        text = self._words.read(body)
        return _event({"type": "transcript.text.delta", "delta": text}) if text else b""

    def end(self, usage: Usage) -> bytes:
        """The whole transcript once more, then ``[DONE]``."""
        done = {"type": "transcript.text.done", "text": self._words.whole(), "usage": _usage(usage)}
        return _event(done) + b"data: [DONE]\n\n"

    def failure(self, error: GatewayError) -> bytes:
        """An ``error`` event."""
        return error_event(error)


class TranscriptAnswer:
    """OpenAI's document, or the words alone."""

    def __init__(self, *, is_bare: bool) -> None:
        self._is_bare = is_bare
        self._words = _Words()

    def feed(self, body: bytes) -> None:
        """Add what the engine sent; raises UpstreamFailed for what is no chunk."""
        self._words.read(body)

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""
        text = self._words.whole()
        return text.encode() if self._is_bare else orjson.dumps({"text": text, "usage": _usage(usage)})


def _format(recording: bytes) -> str:
    """By its first bytes: names and types of uploads are anything."""
    if recording[:4] == b"RIFF" and recording[8:12] == b"WAVE":
        return "wav"
    if recording[:3] == b"ID3" or (recording[:1] == b"\xff" and recording[1:2] >= b"\xe0"):
        return "mp3"
    raise InvalidValue("'file' must be a recording in WAV or MP3.", param="file")


def _temperature(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise InvalidValue("'temperature' must be a number.", param="temperature") from None


def _truth(text: str | None) -> bool:
    if text not in (None, "true", "false", "True", "False", "1", "0"):
        raise InvalidValue("'stream' must be true or false.", param="stream")
    return text in ("true", "True", "1")


def _usage(usage: Usage) -> dict[str, Any]:
    total = usage.prompt_tokens + usage.completion_tokens
    tokens = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens, "total_tokens": total}
    return {"type": "tokens", **tokens}


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"
