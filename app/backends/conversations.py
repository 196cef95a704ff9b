"""Conversations that outlive their engine: what its slots hold, on disk from one life to the next."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from app.engine.binary import EngineBinary
from app.errors import GatewayError
from app.offload import OffloadPlan

_log = logging.getLogger(__name__)

Ask = Callable[[str, Mapping[str, Any] | None], Awaitable[Any]]
"""Asks the engine: path and body → document; raises GatewayError."""

_MANIFEST = "manifest.json"
_SAVE_SECONDS = 10.0
_RESTORE_SECONDS = 30.0
# What decides how the cells of a cache are laid out; a file of another layout must never be read.
_LAYOUT = ("context_per_request", "parallel", "kv_cache_k", "kv_cache_v", "flash_attention")


class Conversations:
    """The saved slots of one model. Used for one life of an engine: ``restore`` at its start, ``save`` at its end.

    ``folder`` is private (0700), and so is each file (0600). They are read once and removed then, and removed unread
    when the model's file, its settings or the engine are others. At most ``limit_bytes`` are kept.
    """

    def __init__(
        self, folder: Path, plan: OffloadPlan, engine: EngineBinary, *, extra_args: tuple[str, ...], limit_bytes: int
    ) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._token_bytes = _token_bytes(plan)
        self._context_tokens = plan.placement.context_per_request
        self._fingerprint = _fingerprint(plan, engine, extra_args)

    def open(self) -> None:
        """Make the folder, in which the engine writes; raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)

    async def restore(self, ask: Ask) -> int:
        """Give the slots back what they held; the tokens that are there again. Never fails."""
        saved = await asyncio.to_thread(self._read)
        tokens = 0
        try:
            async with asyncio.timeout(_RESTORE_SECONDS):
                for number, (file, expected) in enumerate(saved.items()):
                    tokens += await self._restore(ask, number, file, expected)
        except (GatewayError, TimeoutError, KeyError, TypeError, ValueError) as error:
            _log.warning("saved conversations in %s cannot be restored: %s", self.folder, error)
        await asyncio.to_thread(self._clear)
        return tokens

    async def save(self, ask: Ask) -> None:
        """Write down what the idle slots hold, as far as there is room. Never fails."""
        saved: dict[str, int] = {}
        left = self._limit_bytes
        try:
            async with asyncio.timeout(_SAVE_SECONDS):
                for slot in await ask("/slots", None):
                    if not slot["is_processing"]:
                        left -= await self._save(ask, slot, left, saved)
        except (GatewayError, OSError, TimeoutError, KeyError, TypeError, ValueError) as error:
            _log.warning("conversations cannot be saved in %s: %s", self.folder, error)
        with suppress(OSError):
            await asyncio.to_thread(self._write, saved)

    async def _restore(self, ask: Ask, number: int, file: str, expected: int) -> int:
        answer = await ask(f"/slots/{number}?action=restore", {"filename": file})
        if int(answer["n_restored"]) == expected:
            return expected
        # Half a conversation is worse than none.
        await ask(f"/slots/{number}?action=erase", {})
        return 0

    async def _save(self, ask: Ask, slot: Mapping[str, Any], left_bytes: int, saved: dict[str, int]) -> int:
        """Save one slot; the bytes that it took."""
        # Slots that were not used in this life do not say how much they hold.
        most_bytes = self._token_bytes * int(slot.get("n_prompt_tokens") or self._context_tokens)
        if most_bytes > min(left_bytes, shutil.disk_usage(self.folder).free):
            return 0
        name = f"slot-{int(slot['id'])}.bin"
        answer = await ask(f"/slots/{int(slot['id'])}?action=save", {"filename": name})
        file = self.folder / name
        file.chmod(0o600)
        size = file.stat().st_size
        if int(answer["n_saved"]) == 0 or size > left_bytes:
            file.unlink()
            return 0
        saved[name] = int(answer["n_saved"])
        return size

    def _read(self) -> dict[str, int]:
        try:
            manifest = orjson.loads((self.folder / _MANIFEST).read_bytes())
            if manifest["fingerprint"] == self._fingerprint:
                return {str(name): int(tokens) for name, tokens in manifest["slots"].items()}
        except (OSError, KeyError, TypeError, AttributeError, ValueError):
            pass  # nothing was saved, or nothing that can be read
        self._clear()
        return {}

    def _write(self, saved: Mapping[str, int]) -> None:
        for file in self.folder.iterdir():
            if file.name not in saved:
                file.unlink()
        if saved:
            manifest = self.folder / _MANIFEST
            manifest.touch(mode=0o600)
            manifest.write_bytes(orjson.dumps({"fingerprint": self._fingerprint, "slots": saved}))

    def _clear(self) -> None:
        with suppress(OSError):
            self._write({})


def folder_of(base: Path, model_id: str) -> Path:
    """Where the conversations of a model are; names may hold anything, folders may not."""
    return base / hashlib.sha256(model_id.encode()).hexdigest()[:16]


def forget_others(base: Path, kept: Collection[str]) -> None:
    """Remove what was saved of models that are no longer configured to be ``kept``."""
    folders = {folder_of(base, model_id) for model_id in kept}
    with suppress(OSError):
        for folder in base.iterdir():
            if folder not in folders:
                shutil.rmtree(folder, ignore_errors=True)


def _token_bytes(plan: OffloadPlan) -> int:
    """The most that the cache of one token takes, state included."""
    total = sum(ledger.kv_cache_bytes + ledger.state_bytes for ledger in plan.memory.devices)
    total += plan.memory.host.kv_cache_bytes + plan.memory.host.state_bytes
    return -(-total // max(1, plan.placement.context_per_request * plan.placement.parallel))


def _fingerprint(plan: OffloadPlan, engine: EngineBinary, extra_args: tuple[str, ...]) -> str:
    files = [path for path in (plan.model.path, plan.mmproj.path if plan.mmproj is not None else None) if path]
    stats = [(str(path), stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]
    placement = asdict(plan.placement)
    layout = [str(placement[name]) for name in _LAYOUT]
    content = orjson.dumps([stats, layout, list(extra_args), engine.kind, engine.version])
    return hashlib.sha256(content).hexdigest()
