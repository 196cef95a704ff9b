"""Run a program once, bounded in time and in output, whatever it does."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from app.engine.process_group import creation_flags, end

_LIMIT_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
# How long after a process's end what it wrote last may take to be read.
_LAST_WORDS_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a program answered; ``returncode`` is None when the deadline killed it, negative for a signal."""

    returncode: int | None
    stdout: str
    stderr: str


def run_probe(command: Sequence[str], *, environment: Mapping[str, str], timeout_seconds: float) -> ProbeResult:
    """Run ``command`` to its end or to the deadline; raises OSError when it cannot start.

    At most 1 MiB of each stream is kept. The end is that of the process, not of its pipes: a grandchild may hold those
    for ever. The whole group is killed.
    """
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
        creationflags=creation_flags(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
        try:
            finished = _collect(process, outputs, time.monotonic() + timeout_seconds)
        finally:
            end(process)
            process.wait()
        stdout, stderr = (bytes(output).decode("utf-8", "replace") for output in outputs.values())
    return ProbeResult(process.returncode if finished else None, stdout, stderr)


if sys.platform == "win32":

    def _collect(process: subprocess.Popen[bytes], outputs: dict[IO[bytes], bytearray], deadline: float) -> bool:
        """On Windows no selector takes a pipe, and none can be read without waiting."""
        readers = [threading.Thread(target=_read_to_end, args=pair, daemon=True) for pair in outputs.items()]
        for reader in readers:
            reader.start()
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        finally:
            end(process)
            for reader in readers:
                reader.join(_LAST_WORDS_SECONDS)
        return True

    def _read_to_end(stream: IO[bytes], output: bytearray) -> None:
        # Closed under our hands when somebody else holds the pipe open.
        with suppress(OSError, ValueError):
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                output += chunk[: max(0, _LIMIT_BYTES - len(output))]

else:

    def _collect(process: subprocess.Popen[bytes], outputs: dict[IO[bytes], bytearray], deadline: float) -> bool:
        """Read until the process has ended; False when the deadline came first."""
        with selectors.DefaultSelector() as selector:
            for stream, output in outputs.items():
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, data=output)
            while time.monotonic() < deadline:
                # Asked before the read, so that what a finished process wrote last is still read below.
                finished = process.poll() is not None
                for key, _ in selector.select(0 if finished else 0.05):
                    if not _read_into(key.data, key.fd):
                        selector.unregister(key.fileobj)
                if finished:
                    return True
                if not selector.get_map():
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.05)
        return False

    def _read_into(output: bytearray, descriptor: int) -> bool:
        """Read what is there; False at the end of the stream."""
        for _ in range(16):
            try:
                chunk = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            output += chunk[: max(0, _LIMIT_BYTES - len(output))]
        return True
