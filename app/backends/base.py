"""The seam: whatever can count a prompt and answer it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from app.backends.departure import Departure
from app.engine.connection import Sink
from app.protocol import Abilities
from app.tokens import TokenCounter

CHAT_ROUTE = "/v1/chat/completions"


class Reply(Protocol):
    """An answer that has begun."""

    async def read(self) -> bytes:
        """Bytes of the event stream as they arrive, cut anywhere; empty at the end."""

    def hand_to(self, sink: Sink) -> None:
        """From now on give ``sink`` what arrives, at once; what it does not take is for ``read``, in order."""


class Backend(Protocol):
    """Answers requests for text, ``slots`` at a time."""

    @property
    def slots(self) -> int:
        """Requests that it answers at once."""

    @property
    def pool_tokens(self) -> int | None:
        """Tokens that all its slots share; None where each has cells of its own."""

    @property
    def counter(self) -> TokenCounter:
        """Counts prompts against the real context of a slot."""

    @property
    def abilities(self) -> Abilities:
        """What its model can take in."""

    @property
    def chooses_slots(self) -> bool:
        """Whether it knows better than we which of its slots holds a conversation."""

    async def query(self, route: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question that is no stream; raises as ``open`` does."""

    def open(
        self, body: bytes, route: str = CHAT_ROUTE, *, departure: Departure | None = None
    ) -> AbstractAsyncContextManager[Reply]:
        """Start an answer of the engine's ``route``, always a stream; leaving the context lets go of it at once.

        When it is cancelled, ``departure`` is told what the engine had made of it, if it can say. Raises a RequestError
        for what the engine refuses, UpstreamFailed when it dies or breaks off.
        """
