"""A small JSON file that saves work and may be removed at any time: what cannot be read counts as empty."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_MOST_FILE_BYTES = 1 << 20


class KeptFile:
    """Entries by name, the newest last; no more than ``most_entries`` are kept, of a file of our own ``version``.

    A file that cannot be written is reported in the log at ``level``, with ``instead``: what happens without it.
    """

    def __init__(self, path: Path, *, section: str, version: int, most_entries: int, instead: str, level: int) -> None:
        self._path = path
        self._section = section
        self._version = version
        self._most_entries = most_entries
        self._instead = instead
        self._level = level

    def entries(self) -> dict[str, Any]:
        """What is kept; empty for a file that is missing, broken, or of another version."""
        try:
            with self._path.open("rb") as file:
                document = json.loads(file.read(_MOST_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        entries = document.get(self._section) if isinstance(document, dict) else None
        return entries if isinstance(entries, dict) and document.get("format") == self._version else {}

    def write(self, entries: Mapping[str, Any]) -> None:
        """Replace what is kept, in one step: a reader sees the old file or the new one."""
        newest = dict(list(entries.items())[-self._most_entries :])
        text = json.dumps({"format": self._version, self._section: newest}, indent=1) + "\n"
        beside = self._path.with_name(f"{self._path.name}.{os.urandom(6).hex()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(text, encoding="utf-8")
                beside.replace(self._path)
            except OSError:
                with suppress(OSError):
                    beside.unlink()
                raise
        except OSError as error:
            _log.log(self._level, "Cannot write %s (%s); %s.", self._path, error.strerror, self._instead)
