"""When the configuration is read again: at SIGHUP, and when its file has changed if the operator wants that."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from app.api import Gateway
from app.errors import GatewayError
from app.service import ServiceManager

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0

_Signature = tuple[int, int, int]


class FileWatch:
    """Tells when a file has become another one and is no longer being written."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._told = self._last = self._look()

    def has_changed(self) -> bool:
        """Whether it differs from what was last told, and has been still since the last look; once per change.

        A file that is missing is one that an editor is about to replace.
        """
        before, self._last = self._last, self._look()
        if self._last is None or self._last != before or self._last == self._told:
            return False
        self._told = self._last
        return True

    def _look(self) -> _Signature | None:
        try:
            stat = os.stat(self._file)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def listen_for_hangups(hear: Callable[[], None]) -> None:
    """From now on SIGHUP calls ``hear`` instead of ending the process; Windows has no such signal."""
    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hear)


class Reloader:
    """One reload per request for one; several that come during one are one more.

    ``asked`` is set for each. ``file`` is looked at while ``server.watch_config`` is on.
    """

    def __init__(
        self,
        gateway: Gateway,
        service: ServiceManager,
        *,
        file: Path | None,
        asked: asyncio.Event,
    ) -> None:
        self._gateway = gateway
        self._service = service
        self._file = file
        self._asked = asked

    def ask(self) -> None:
        """The configuration is to be read again."""
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reload_when_asked())
            if self._file is not None:
                tasks.create_task(self._watch(self._file))

    async def _watch(self, file: Path) -> None:
        watch = await asyncio.to_thread(FileWatch, file)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._gateway.settings.server.watch_config and await asyncio.to_thread(watch.has_changed):
                _log.info("%s has changed", file)
                self.ask()

    async def _reload_when_asked(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._service.reloading()
            try:
                _log.info("reloaded: %s", (await self._gateway.reload()).summary())
            except GatewayError as error:
                _log.error("the configuration is not used, the old one stays in force: %s", error)
            except Exception:
                # Whatever it was, the next reload must be heard.
                _log.exception("the reload failed unexpectedly")
            self._service.ready("serving " + ", ".join(model.id for model in self._gateway.catalog))
