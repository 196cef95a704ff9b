"""The flags of an engine as its help lists them, kept from one start to the next.

What is kept must never outlive the program that said it. A path, a size and a time of change are not enough: what is
configured is often a wrapper, which stays as it is while the binary behind it is replaced. So an entry holds

* for the size, times and inode of the program and of everything that it is known to execute: a script is followed
  where it is one of the simple kind (``export``\\ s of plain values, then ``exec`` of an absolute path); of any other
  script nothing is kept;
* for the very words of its ``--version``, which is asked each time: it is a binary's libraries that know its flags,
  they may be replaced without it, and an engine that cannot start at all must not be found in a file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from app.engine.kept_file import KeptFile

Flags = tuple[frozenset[str], frozenset[str]]

_FORMAT = 1
_MOST_ENTRIES = 16
_MOST_WRAPPERS = 4
_MOST_SCRIPT_BYTES = 1 << 14
_PLAIN = r"""(?:"[^"$`\\]*"|[^\s"'$`\\;&|<>()]*)"""
_HARMLESS_LINE = re.compile(rf"\s*(?:#.*|export(?:\s+[A-Za-z_]\w*={_PLAIN})+)?\s*")
_EXEC_LINE = re.compile(r"""\s*exec\s+("?)(/[^\s"'$`\\;&|<>()]+)\1\s+"\$@"\s*""")


class FlagTable:
    """Flags, and those among them that take a value, of programs that were asked before."""

    def __init__(self, path: Path) -> None:
        self._file = KeptFile(
            path,
            section="engines",
            version=_FORMAT,
            most_entries=_MOST_ENTRIES,
            instead="the next start asks the engine for its flags again",
            level=logging.INFO,
        )

    def find(self, program: Iterable[Path], version: str) -> Flags | None:
        """What is known of a program of these files that calls itself ``version``; None when it must be asked."""
        entry = self._file.entries().get(fingerprint(program) or "")
        if not isinstance(entry, dict) or entry.get("version") != version:
            return None
        flags, valued = _words(entry.get("flags")), _words(entry.get("valued"))
        return (flags, valued) if valued < flags else None

    def keep(self, program: Iterable[Path], version: str, flags: Flags) -> None:
        """Remember what a program said of itself, unless its files do not tell when it has changed."""
        key = fingerprint(program)
        if key is None:
            return
        entries = self._file.entries()
        entries.pop(key, None)
        entries[key] = {"version": version, "flags": sorted(flags[0]), "valued": sorted(flags[1])}
        self._file.write(entries)


def fingerprint(program: Iterable[Path]) -> str | None:
    """What changes whenever one of these files does, or one that they execute; None where that cannot be known."""
    files = [file for path in program for file in _executed(path)]
    try:
        return " | ".join(_identity(file) for file in files if file is not None) if all(files) else None
    except OSError:
        return None


def _identity(path: Path) -> str:
    # The time of the inode's change is set by the kernel alone: no copy or package restores it.
    now = path.stat()
    return f"{path} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns} {now.st_dev}:{now.st_ino}"


def _executed(path: Path) -> Iterator[Path | None]:
    """``path`` and, as long as they are wrappers, what it executes; ends with None where that is not to be seen."""
    for _ in range(_MOST_WRAPPERS):
        yield path
        try:
            with path.open("rb") as file:
                text = file.read(_MOST_SCRIPT_BYTES)
        except OSError:
            yield None
            return
        if not text.startswith(b"#!"):
            return
        target = _target(text.decode("utf-8", "replace"))
        if target is None:
            break
        path = target
    yield None


def _target(script: str) -> Path | None:
    """What a simple wrapper executes in its place."""
    *before, last = [line for line in script.splitlines() if line.strip()]
    found = _EXEC_LINE.fullmatch(last)
    return Path(found[2]) if found and all(map(_HARMLESS_LINE.fullmatch, before)) else None


def _words(value: object) -> frozenset[str]:
    words = value if isinstance(value, list) else []
    sane = all(isinstance(word, str) and word.startswith("-") for word in words)
    return frozenset(words) if sane else frozenset()
