"""One answer of the fake engine: how many tokens, and the bytes of each event, in llama-server's own form."""

from __future__ import annotations

import json
import re
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fake_switches import Switches

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
WORDS = (
    "The",
    " sky",
    " looks",
    " blue",
    " because",
    " of",
    " scattered",
    " light",
    ",",
    " mostly",
    "北京",
    "🌍",
    ".\n",
)
TOKEN = re.compile(r"<\|\w+\|>|\s?\w+|\s|[^\w\s]")


def encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def tokenize(text: str) -> list[int]:
    return [zlib.crc32(piece.encode()) % 49152 for piece in TOKEN.findall(text)]


def render(messages: Sequence[Mapping[str, Any]]) -> str:
    """The ChatML text of SmolLM2's own template; content parts are joined."""
    turns = [(str(message["role"]), message.get("content") or "") for message in messages]
    if turns and turns[0][0] != "system":
        turns.insert(0, ("system", SYSTEM))
    texts = [
        (role, content if isinstance(content, str) else "".join(part.get("text", "") for part in content))
        for role, content in turns
    ]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in texts) + "<|im_start|>assistant\n"


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, kind: str, message: str, **more: int) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": status, "message": message, "type": kind, **more}}


class Completion:
    """One answer: how long it is, and the bytes of its events."""

    def __init__(self, body: Mapping[str, Any], *, alias: str, context: int, switches: Switches) -> None:
        self.prompt_tokens = len(tokenize(render(body["messages"])))
        if self.prompt_tokens >= context:
            text = (
                f"request ({self.prompt_tokens} tokens) exceeds the available context size ({context} tokens), "
                "try increasing it"
            )
            numbers = {"n_prompt_tokens": self.prompt_tokens, "n_ctx": context}
            raise Refusal(400, "exceed_context_size_error", text, **numbers)
        asked = next(
            (v for k in ("n_predict", "max_completion_tokens", "max_tokens") if (v := body.get(k)) is not None), -1
        )
        wanted = len(switches.tool_deltas) or switches.chunks
        self.tokens = min(wanted, max(1, asked) if asked >= 0 else wanted, context - self.prompt_tokens)
        self.stream = bool(body.get("stream"))
        whole = "tool_calls" if any("tool_calls" in delta for delta in switches.tool_deltas) else "stop"
        self.finish_reason = whole if self.tokens == wanted else "length"
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.sends_usage = switches.usage == "always" or (switches.usage == "asked" and wants_usage)
        self._started = time.monotonic()
        self._common = {"created": int(time.time()), "id": f"chatcmpl-{secrets.token_hex(16)}", "model": alias}
        self._common |= {"system_fingerprint": "b11669-fake", "object": "chat.completion.chunk"}
        self.id = str(self._common["id"])
        words = (switches.content,) if switches.content else WORDS
        self._deltas = [dict(delta) for delta in switches.tool_deltas] or [{"content": word} for word in words]
        self._events = [self._event(delta) for delta in self._deltas]

    def _event(self, delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"finish_reason": finish_reason, "index": 0, "delta": delta}
        return b"data: " + encode({"choices": [choice], **self._common, **more}) + b"\n\n"

    def chunk(self, number: int) -> bytes:
        """Chunk 0 carries the role event too, as llama-server's first write does."""
        role = self._event({"role": "assistant", "content": None}) if number == 0 else b""
        return role + self._events[number % len(self._events)]

    def end(self) -> bytes:
        """Finish chunk and, when wanted, usage; the timings are in the last of them."""
        if not self.sends_usage:
            return self._event({}, self.finish_reason, timings=self.timings())
        usage = {"choices": [], **self._common, "usage": self.usage(), "timings": self.timings()}
        return self._event({}, self.finish_reason) + b"data: " + encode(usage) + b"\n\n"

    def usage(self) -> dict[str, Any]:
        counts = {"completion_tokens": self.tokens, "prompt_tokens": self.prompt_tokens}
        return {**counts, "total_tokens": sum(counts.values()), "prompt_tokens_details": {"cached_tokens": 0}}

    def timings(self) -> dict[str, float]:
        """In milliseconds, and per second, as llama-server names them."""
        spent = max((time.monotonic() - self._started) * 1000, 0.001)
        prompt = {"cache_n": 0, "prompt_n": self.prompt_tokens, "prompt_ms": 1.0, "prompt_per_token_ms": 0.03}
        predicted = {"predicted_n": self.tokens, "predicted_ms": spent, "predicted_per_token_ms": spent / self.tokens}
        rates = {"prompt_per_second": self.prompt_tokens * 1000.0, "predicted_per_second": self.tokens * 1000 / spent}
        return prompt | predicted | rates

    def document(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        texts = [self._deltas[number % len(self._deltas)].get("content") or "" for number in range(self.tokens)]
        message = {"role": "assistant", "content": "".join(texts)}
        choice = {"finish_reason": self.finish_reason, "index": 0, "message": message}
        common = {**self._common, "object": "chat.completion"}
        return {"choices": [choice], **common, "usage": self.usage(), "timings": self.timings()}
