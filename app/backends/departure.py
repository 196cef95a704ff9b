"""What becomes known of a request whose client leaves before the end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from app.engine.connection import Response
from app.engine.releases import Releases
from app.errors import EngineGone

# An engine in the middle of a batch hears of it only afterwards; nobody waits longer for its last word.
_LAST_WORD_SECONDS = 1.0


@dataclass(slots=True)
class Departure:
    """Where a request runs, and, when its client has left, what had come and what the engine had made of it by then.

    ``held_tokens`` is what prompt and answer took in the slot at the end, None when the engine did not say.
    """

    slot: int | None
    unread: bytes = b""
    held_tokens: int | None = None

    async def let_go(self, response: Response, releases: Releases) -> None:
        """Close the engine's socket and wait until it has freed the slot."""
        self.unread = response.read_nowait()
        is_over = response.status != 200 or response.at_eof() or b"[DONE]" in self.unread
        if self.slot is None or is_over:
            response.close()
            return
        with releases.awaited(self.slot) as heard:
            response.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    self.held_tokens = await heard


async def landed(start: asyncio.Task[Response]) -> Response | None:
    """The response that was on its way when the client left; None when it does not come."""
    with suppress(TimeoutError, OSError, EngineGone):
        async with asyncio.timeout(_LAST_WORD_SECONDS):
            return await start
    return None
