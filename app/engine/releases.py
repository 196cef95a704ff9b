"""When the engine lets go of a slot, by its log, and how many tokens were in it: the only place where it says so."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# llama.cpp tools/server/server-context.cpp, server_slot::release; the prefix with time and level is not looked at.
_RELEASE = re.compile(r"\brelease: id +(\d+) \| task -?\d+ \| stop processing: n_tokens = (\d+)")


class Releases:
    """Reads the log of one engine life for those who wait; while nobody does, nothing is read."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[int]] = {}

    def feed(self, lines: Iterable[str]) -> None:
        """Tell who waits for a slot that is mentioned here."""
        if not self._waiting:
            return
        for line in lines:
            found = _RELEASE.search(line)
            if found is not None and (heard := self._waiting.pop(int(found[1]), None)) and not heard.done():
                heard.set_result(int(found[2]))

    @contextmanager
    def awaited(self, slot: int) -> Iterator[asyncio.Future[int]]:
        """Tokens of prompt and answer that ``slot`` holds when it is next let go; one at a time may wait for a slot."""
        heard = self._waiting[slot] = asyncio.get_running_loop().create_future()
        try:
            yield heard
        finally:
            if self._waiting.get(slot) is heard:
                del self._waiting[slot]
