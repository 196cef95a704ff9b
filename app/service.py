"""Tell systemd how we are: one datagram per message, no library (sd_notify(3))."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping

_log = logging.getLogger(__name__)


class ServiceManager:
    """What started us, if it listens at ``NOTIFY_SOCKET``; without one every message goes nowhere."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # "@" begins a name in the abstract namespace, written as a NUL byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        microseconds = environ.get("WATCHDOG_USEC", "")
        for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog_seconds = int(microseconds) / 1e6 if microseconds.isdecimal() and for_us else 0.0

    def ready(self, status: str) -> None:
        """Serving, after a start or a reload."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """A reload begins; ``ready`` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}\nSTATUS=reading the configuration")

    def stopping(self, *, within_seconds: float) -> None:
        """Draining has begun and takes at most so long."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={round(within_seconds * 1e6)}\nSTATUS=letting open answers end")

    async def feed_watchdog(self) -> None:
        """Say that the event loop turns, twice per watchdog interval, until cancelled."""
        while self._watchdog_seconds > 0:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_seconds / 2)

    def _send(self, message: str) -> None:
        # systemd is Linux's alone.
        if self._address and sys.platform != "win32":
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
                    # A service manager that does not read must not stop us.
                    connection.setblocking(False)
                    connection.sendto(message.encode(), self._address)
            except OSError as error:
                _log.warning("the service manager does not listen: %s", error.strerror)
