"""What engines were found to count differently, kept across restarts: one small JSON file that a person may read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from app.engine.binary import EngineBinary
from app.engine.kept_file import KeptFile
from app.gguf import ModelFacts
from app.hardware import Machine
from app.memory import Correction
from app.offload import Wish

_FORMAT = 1
_MOST_ENTRIES = 256
_HASH_LENGTH = 16
_MAY_BE_NULL = frozenset({"mmproj_bytes", "draft_bytes"})


class LearnedCorrections:
    """Corrections by model content, engine, devices and wish; the file may be removed at any time.

    A file that cannot be read counts as empty, one that cannot be written is reported in the log: what was learned
    only saves a question to the engine.
    """

    def __init__(self, path: Path) -> None:
        self._file = KeptFile(
            path,
            section="corrections",
            version=_FORMAT,
            most_entries=_MOST_ENTRIES,
            instead="the next start asks the engine again",
            level=logging.WARNING,
        )

    def find(self, key: str) -> Correction:
        """What is known under ``key``, else no correction."""
        entry = self._file.entries().get(key)
        return _correction(entry) if isinstance(entry, dict) else Correction()

    def keep(self, key: str, correction: Correction, *, model: str) -> None:
        """Remember ``correction`` as the newest; the oldest beyond 256 are forgotten."""
        entries = self._file.entries()
        before = entries.pop(key, None)
        if not correction.is_none:
            entries[key] = {"model": model, "differs": correction.describe(), **asdict(correction)}
        if entries.get(key) != before:
            self._file.write(entries)


def learned_key(
    facts: ModelFacts,
    engine: EngineBinary,
    machine: Machine,
    wish: Wish,
    *,
    mmproj: ModelFacts | None = None,
    draft: ModelFacts | None = None,
) -> str:
    """Under what a correction holds: these tensors, this build, these devices, and what was asked for."""
    devices = "+".join(f"{device.name} {device.description}" for device in machine.devices) or "no device"
    asked = [f"{name}={value}" for name, value in asdict(wish).items() if not name.endswith("_reserve_bytes")]
    asked += [f"mmproj={content_hash(mmproj)}"] if mmproj is not None else []
    asked += [f"draft={content_hash(draft)}"] if draft is not None else []
    return " | ".join((content_hash(facts), f"{engine.kind} {engine.version}", devices, " ".join(asked)))


def content_hash(facts: ModelFacts) -> str:
    """What identifies a model whatever its file is called: its architecture's keys and its tensor table."""
    digest = sha256()
    prefix = facts.architecture + "."
    for key in sorted(key for key in facts.metadata if key.startswith(prefix)):
        digest.update(f"{key}={facts.metadata[key]}\n".encode("utf-8", "replace"))
    for tensor in facts.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.type}\n".encode("utf-8", "replace"))
    return digest.hexdigest()[:_HASH_LENGTH]


def _correction(entry: Mapping[str, Any]) -> Correction:
    """An entry of the file; anything odd in it counts as nothing."""
    known = {field.name: entry[field.name] for field in fields(Correction) if field.name in entry}
    # JSON as Python reads it may hold NaN, which compares with nothing.
    sane = all(value is None or (isinstance(value, int | float) and isfinite(value)) for value in known.values())
    sane = sane and all(value is not None for name, value in known.items() if name not in _MAY_BE_NULL)
    return Correction(**known).bounded() if sane else Correction()
