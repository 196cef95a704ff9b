"""How a server elsewhere counts a prompt: exactly where it can, else it is estimated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from app.backends.remote_limits import Limits, Questions, RouteMissing
from app.errors import UpstreamFailed
from app.tokens import BY_LETTERS, PromptEstimate, TokenCounter, by_vocabulary

_HELLO = orjson.dumps({"messages": [{"role": "user", "content": "hello"}]})


class RemoteCount:
    """Asks the server; ``can_count`` finds out by which of its routes, if by any."""

    def __init__(self, server: Questions) -> None:
        self._server = server
        self._count: Callable[[dict[str, Any]], Awaitable[int]] = self._by_input_tokens

    async def can_count(self) -> bool:
        """Whether it counts a short prompt; may load the model there."""
        for way in (self._by_input_tokens, self._by_template):
            self._count = way
            try:
                await self.count_chat(_HELLO)
            except RouteMissing:
                continue
            return True
        return False

    async def count_chat(self, body: bytes) -> int:
        """Exact prompt tokens of a chat body."""
        try:
            return await self._count(orjson.loads(body))
        except (KeyError, TypeError, ValueError) as error:
            raise UpstreamFailed("The remote server's count cannot be read.") from error

    async def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text that the model's template makes of these messages."""
        answer = await self._server.ask("apply-template", {"messages": list(messages)}, at_root=True)
        return str(answer["prompt"])

    async def tokenize(self, text: str, *, special: bool = False) -> int:
        """Tokens of a text; with ``special`` BOS and EOS too."""
        return await self._tokens(text, special=special)

    async def _by_input_tokens(self, document: dict[str, Any]) -> int:
        answer = await self._server.ask("chat/completions/input_tokens", document)
        return int(answer["input_tokens"])

    async def _by_template(self, document: dict[str, Any]) -> int:
        answer = await self._server.ask("apply-template", document, at_root=True)
        return await self._tokens(str(answer["prompt"]), special=True)

    async def _tokens(self, text: str, *, special: bool) -> int:
        body = {"content": text, "add_special": special, "parse_special": True}
        return len((await self._server.ask("tokenize", body, at_root=True))["tokens"])


async def new_counter(
    server: Questions, limits: Limits, tokenizer: Path | None
) -> tuple[TokenCounter, PromptEstimate | None]:
    """The counter for a server: its own counts, else the estimate that is returned with it.

    Raises GatewayError when the server cannot be asked.
    """
    count = RemoteCount(server)
    if await count.can_count():
        return TokenCounter(count, context_tokens=limits.context_tokens, vocabulary=None, template=None), None
    estimate = PromptEstimate(BY_LETTERS if tokenizer is None else await asyncio.to_thread(by_vocabulary, tokenizer))
    context_tokens = limits.context_tokens
    counter = TokenCounter(estimate, context_tokens=context_tokens, vocabulary=None, template=None, is_estimate=True)
    return counter, estimate
