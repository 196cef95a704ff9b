"""Meter the engine's stream while it goes by: tokens, speed, finish, error; parse only what can carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.protocol.sse import SSESplitter, event_data


def _says_something(chunk: bytes) -> bool:
    """Whether the chunk can change what the meter knows; any other is forwarded unread.

    Inside a JSON string the quotes would be escaped, so that generated text never matches by accident. Written out,
    since a loop over the marks would cost as much as everything else that we do to a chunk.
    """
    return (
        b'"finish_reason":"' in chunk
        or b'"usage":' in chunk
        or b'"error":' in chunk
        or b"[DONE]" in chunk
        or b'"prompt_progress":' in chunk
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer, by the engine's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def read(cls, usage: Mapping[str, Any]) -> Usage:
        """From a ``usage`` object; missing numbers are 0."""
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )

    def plus_choice(self, other: Usage) -> Usage:
        """The usage of two choices of one prompt: the prompt counts once, as in OpenAI's API."""
        return Usage(
            prompt_tokens=max(self.prompt_tokens, other.prompt_tokens),
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=max(self.cached_tokens, other.cached_tokens),
        )

    def plus_prompt(self, other: Usage) -> Usage:
        """The usage of two prompts of one request."""
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )

    def document(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object."""
        return {
            "completion_tokens": self.completion_tokens,
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Timings:
    """Speed of one answer as the engine measured it, in tokens per second; None where it measured nothing."""

    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None

    @classmethod
    def read(cls, timings: Mapping[str, Any]) -> Timings:
        """From llama-server's ``timings``; the first generated token is part of the prompt's time."""
        prompt_seconds = float(timings.get("prompt_ms") or 0) / 1000
        decode_seconds = float(timings.get("predicted_ms") or 0) / 1000
        prompt_tokens = int(timings.get("prompt_n") or 0)
        decode_tokens = int(timings.get("predicted_n") or 0) - 1
        return cls(
            prompt_tokens_per_second=prompt_tokens / prompt_seconds if prompt_seconds > 0 else None,
            generation_tokens_per_second=(
                decode_tokens / decode_seconds if decode_seconds > 0 and decode_tokens > 0 else None
            ),
        )


class UsageMeter:
    """Watches one stream of chunks and says what of it the client gets.

    Everything goes through unchanged but the progress of the prompt, which we asked for, and the usage chunks: they
    are ours unless the client asked for them, and with several choices the engine sends one per choice where OpenAI's
    API has a single one before ``[DONE]``. Of text completions each choice's usage is in the chunk that ends it.

    ``choices`` counts the answers to all of ``prompts``; ``has_roles`` says that each begins with its role.
    """

    def __init__(self, *, keep_usage: bool, choices: int = 1, prompts: int = 1, has_roles: bool = True) -> None:
        self._keep_usage = keep_usage
        self._choices = choices
        self._prompts = prompts
        self._opening_events = choices if has_roles else 0
        # Several usages become one before the end.
        self._is_merging = choices > 1
        self._splitter = SSESplitter()
        self._last_usage: dict[str, Any] | None = None
        self.events = 0
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finished = 0
        self.done = False
        # Of each choice: one prompt has several, several prompts have one each.
        self._processed_tokens: dict[int, int] = {}
        self._whole_prompt_tokens = 0
        self._reused_tokens = 0
        self.error: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        """Whether the engine ended the answer as it should: every choice finished, then ``[DONE]``."""
        return self.done and self.finished >= self._choices and self.error is None

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens processed or reused so far: the engine's count at the end, its progress before."""
        if self._prompts > 1:
            return sum(self._processed_tokens.values())
        return self.usage.prompt_tokens if self.usage is not None else max(self._processed_tokens.values(), default=0)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of them that were reused."""
        return self.usage.cached_tokens if self.usage is not None else self._reused_tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens generated: the engine's count, else one per event that passed (but for that of the role)."""
        passed = max(0, self.events - self._opening_events)
        if self.usage is None:
            return passed
        counted = self.usage.completion_tokens
        # The usage of some choices may have come before that of the others.
        return counted if self.finished >= self._choices else max(counted, passed)

    def left(self, held_tokens: int, *, prompt_tokens: int) -> None:
        """Its client has left, and so many tokens of the one prompt and the one answer were in the slot at the end.

        The token generated last is never in it. ``prompt_tokens`` is the prompt by another count, for a client that
        left before the engine told its own.
        """
        if self.usage is not None or held_tokens + 1 < self.prompt_tokens + self.generated_tokens:
            return
        prompt = self._whole_prompt_tokens or min(prompt_tokens, held_tokens)
        generated = max(0, held_tokens - prompt + 1)
        self.usage = Usage(min(prompt, held_tokens), generated, self._reused_tokens)

    def is_plain(self, chunk: bytes) -> bool:
        """Whether it is whole events that go to the client as they are, and are only to be counted."""
        return (
            not self._splitter.pending
            and chunk.endswith(b"\n\n")
            and not _says_something(chunk)
            and self.error is None
            and not self.done
        )

    def count(self, chunk: bytes) -> None:
        """A plain chunk has gone to the client."""
        self.events += chunk.count(b"}\n\n")

    def feed(self, chunk: bytes) -> bytes:
        """What of ``chunk`` goes to the client now; raises EventTooLong."""
        if self.is_plain(chunk):
            self.count(chunk)
            return chunk
        if self.error is not None or self.done:
            return b""
        return b"".join(self._inspect(event) for event in self._splitter.feed(chunk))

    def _inspect(self, event: bytes) -> bytes:
        if self.error is not None or self.done:
            return b""
        if not _says_something(event):
            self.events += event.startswith(b"data:")
            return event
        data = event_data(event)
        if data.strip() == b"[DONE]":
            if self.finished < self._choices:
                self.error = {"message": "the engine ended the stream before the answer was finished"}
                return b""
            self.done = True
            return self._merged_usage() + event
        try:
            return self._read(event, orjson.loads(data))
        except (ValueError, TypeError, AttributeError):
            self.error = {"message": "the engine sent an event that cannot be read"}
            return b""

    def _read(self, event: bytes, chunk: Any) -> bytes:
        if not isinstance(chunk, dict):
            return event
        if chunk.get("error"):
            self.error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": str(chunk["error"])}
            return b""
        if "prompt_progress" in chunk:
            # We ask for these so that the engine writes, and notices a client that left, during a long prompt.
            progress = chunk["prompt_progress"]
            self._whole_prompt_tokens = int(progress.get("total") or 0)
            self._note_processed(chunk, int(progress["processed"]))
            self._reused_tokens = int(progress.get("cache") or 0)
            return b""
        choices = chunk.get("choices") or []
        self.finished += sum(1 for choice in choices if choice.get("finish_reason"))
        if not chunk.get("usage"):
            self.events += 1
            return event
        return self._take_usage(event, chunk, is_only_usage=not choices)

    def _take_usage(self, event: bytes, chunk: dict[str, Any], *, is_only_usage: bool) -> bytes:
        usage = Usage.read(chunk["usage"])
        if self.usage is None:
            self.usage = usage
        else:
            self.usage = self.usage.plus_choice(usage) if self._prompts == 1 else self.usage.plus_prompt(usage)
        if chunk.get("timings"):
            self.timings = Timings.read(chunk["timings"])
        if not is_only_usage:
            self._note_processed(chunk, usage.prompt_tokens)
            self._is_merging, self._last_usage = True, chunk | {"choices": []}
            return _event({key: value for key, value in chunk.items() if key not in ("usage", "timings")})
        self._last_usage = chunk
        return b"" if self._is_merging or not self._keep_usage else event

    def _note_processed(self, chunk: Mapping[str, Any], tokens: int) -> None:
        for choice in chunk.get("choices") or ({"index": 0},):
            index = int(choice.get("index") or 0)
            self._processed_tokens[index] = max(tokens, self._processed_tokens.get(index, 0))

    def _merged_usage(self) -> bytes:
        """The single usage chunk, where the engine did not send one by itself."""
        if not self._keep_usage or not self._is_merging or self._last_usage is None or self.usage is None:
            return b""
        chunk = {key: value for key, value in self._last_usage.items() if key != "timings"}
        return _event(chunk | {"usage": self.usage.document()})


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
