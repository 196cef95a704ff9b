"""Wait in the event loop for the end of a process, without reaping it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress

_POLL_SECONDS = 0.02


async def ended(popen: subprocess.Popen[bytes]) -> None:
    """Until the process has ended, however long others hold its pipes open."""
    try:
        await _told_by_system(popen)
    except (AttributeError, OSError):
        # No pidfd: macOS, or a sandbox that forbids it.
        while popen.poll() is None:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(_POLL_SECONDS)


if sys.platform == "win32":

    async def _told_by_system(popen: subprocess.Popen[bytes]) -> None:
        """A process handle is nothing that a loop could watch, so a thread does."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def wait() -> None:
            popen.wait()
            # The loop may be gone, and who waits with it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=wait, name=f"exit of {popen.pid}", daemon=True).start()
        await over.wait()

else:

    async def _told_by_system(popen: subprocess.Popen[bytes]) -> None:
        """Raises OSError or AttributeError where there is no pidfd."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = os.pidfd_open(popen.pid)
        try:
            loop.add_reader(descriptor, readable.set)
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
