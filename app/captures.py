"""What was asked and answered, word for word, kept for debugging when the operator asks for it."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from app.backlog import Backlog

_MOST_WAITING = 256
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Capture:
    """One request and its answer; ``is_cut`` when one of them was longer than what is kept."""

    request_id: str
    path: str
    status: int | None
    request: bytes
    response: bytes
    is_cut: bool

    def content(self) -> bytes:
        """As JSON, the bodies as text."""
        return orjson.dumps(
            {
                "id": self.request_id,
                "path": self.path,
                "status": self.status,
                "cut": self.is_cut,
                "request": self.request.decode(errors="replace"),
                "response": self.response.decode(errors="replace"),
            },
            option=orjson.OPT_INDENT_2,
        )


class CaptureFolder:
    """One file per request, the oldest removed when together they are over ``limit_bytes``.

    Only the writing thread touches the folder; files of another name are left alone.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, on_lost: Callable[[int], None]) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._backlog: Backlog[Capture] = Backlog(
            "the folder of bodies", self._write, most=_MOST_WAITING, on_lost=on_lost
        )
        self._numbers = itertools.count()
        self._kept: deque[tuple[Path, int]] | None = None
        self._kept_bytes = 0

    def put(self, capture: Capture) -> None:
        """Take one."""
        self._backlog.put(capture)

    async def run(self) -> None:
        """Write until cancelled, then what is left."""
        await self._backlog.run()

    def _write(self, captures: Sequence[Capture]) -> None:
        kept = self._look()
        for capture in captures:
            content = capture.content()
            if len(content) > self._limit_bytes:
                continue
            self._make_room(kept, len(content))
            # Names sort by time; the number keeps apart what ends in the same microsecond.
            moment = f"{time.time_ns() // 1000:017d}-{next(self._numbers) % 1000:03d}"
            path = self._folder / f"{moment}-{capture.request_id[:64]}{_SUFFIX}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            kept.append((path, len(content)))
            self._kept_bytes += len(content)

    def _look(self) -> deque[tuple[Path, int]]:
        """What earlier runs have left counts too."""
        if self._kept is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = [(path, path.stat().st_size) for path in sorted(self._folder.glob(f"*{_SUFFIX}"))]
            self._kept = deque(found)
            self._kept_bytes = sum(size for _, size in found)
        return self._kept

    def _make_room(self, kept: deque[tuple[Path, int]], size_bytes: int) -> None:
        while kept and self._kept_bytes + size_bytes > self._limit_bytes:
            path, freed = kept.popleft()
            with suppress(FileNotFoundError):
                path.unlink()
            self._kept_bytes -= freed
