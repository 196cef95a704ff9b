"""One line of JSON per request, in a file or on standard output; opened anew for each batch, so it may be rotated."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from app.backlog import Backlog
from app.request_record import RequestRecord

_MOST_LINES = 20_000


class RequestLog:
    """Keeps records; ``path`` None is standard output."""

    def __init__(self, path: Path | None, *, on_lost: Callable[[int], None]) -> None:
        self._path = path
        self._backlog: Backlog[RequestRecord] = Backlog(
            "the request log", self._write, most=_MOST_LINES, on_lost=on_lost
        )

    def observe(self, record: RequestRecord) -> None:
        """Take one record."""
        self._backlog.put(record)

    async def run(self) -> None:
        """Write until cancelled, then what is left."""
        await self._backlog.run()

    def _write(self, records: Sequence[RequestRecord]) -> None:
        lines = b"".join(orjson.dumps(record.document()) + b"\n" for record in records)
        if self._path is None:
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # It names who asked when: for the operator alone.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(lines)
