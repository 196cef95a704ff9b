"""A real gateway in a process of its own, on a port of the system's choice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

_SERVING = re.compile(r"serving .* on (https?://127\.0\.0\.1:\d+)/v1")
START_SECONDS = 60.0


class GatewayProcess:
    """``llama-gateway serve --config FILE``; ``url`` has no ``/v1``."""

    def __init__(self, process: subprocess.Popen[str], *, state_dir: Path) -> None:
        self.process = process
        self.state_dir = state_dir
        self.log: list[str] = []
        self._said_url = threading.Event()
        self._url = ""
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        assert self._said_url.wait(START_SECONDS), "the gateway did not start:\n" + "".join(self.log)
        assert self._url, "the gateway ended:\n" + "".join(self.log)
        return self._url

    def engine_pids(self) -> list[int]:
        """Processes below the gateway, wrappers and engines alike."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def open_files(self) -> int:
        return psutil.Process(self.pid).num_fds()

    def stop(self, *, seconds: float = 30) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := _SERVING.search(line):
                self._url = match.group(1)
                self._said_url.set()
        self._said_url.set()


@contextmanager
def running_gateway(
    config: Mapping[str, Any], folder: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[GatewayProcess]:
    """Serve ``config`` (server.port is 0 unless given) until the block ends; SIGKILL if it will not stop."""
    folder.mkdir(parents=True, exist_ok=True)
    state_dir = folder / "state"
    document: dict[str, Any] = {"state_dir": str(state_dir), **config}
    document["server"] = {"port": 0, "drain_seconds": 2} | dict(config.get("server") or {})
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "serve", "--config", str(file)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | dict(environment or {}),
    )
    gateway = GatewayProcess(process, state_dir=state_dir)
    try:
        yield gateway
    finally:
        try:
            gateway.stop()
        except subprocess.TimeoutExpired:
            gateway.kill()
            raise
        finally:
            if process.stderr is not None:
                process.stderr.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_until(condition: Any, *, seconds: float, what: str) -> float:
    """Poll a condition of another process, which sends no events to us; returns the seconds it took."""
    started = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        pause.wait(0.02)
    return time.monotonic() - started
