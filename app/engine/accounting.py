"""Ask an engine what a command line would take: it says so before it reads weights, and is ended then.

Builds since September 2026 say it as JSON, those since December 2025 as a table in their log, older ones not at all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.engine.binary import EngineBinary
from app.engine.command import build_argv
from app.engine.endpoint import Endpoint
from app.engine.flags import FLAGS
from app.engine.output import EngineOutput
from app.engine.process_group import creation_flags, dying_with_us, end
from app.engine.report import Cause, EngineExit, cause_of_death
from app.engine.state import State
from app.memory import AccountedMemory, Accounting
from app.offload import OffloadPlan

_MIB = 1 << 20
_DEADLINE_SECONDS = 20.0
_CHUNK_BYTES = 1 << 16
_EXIT_LINES = 60

# llama.cpp common/fit.cpp; the description of a device may hold parentheses.
_DEVICE_ROW = re.compile(
    r"\| +- (\S+) \(.*\) +\| +\d+ = +-?\d+ \+ \( *\d+ = +(\d+) \+ +(\d+) \+ +(\d+)\) \+ +-?\d+ +\|"
)
_HOST_ROW = re.compile(r"\| +- (\S+) +\| +\d+ = +(\d+) \+ +(\d+) \+ +(\d+) +\|")
_TABLE = "common_memory_breakdown_print: |"
_EXTRA = "getting device memory data for the extra model"
_PROJECTOR = re.compile(r"estimated worst-case memory usage of mmproj is ([\d.]+) MiB")
_EXCUSE = re.compile(r"common_fit_params: ((?:encountered an error|failed to fit) .*)")
# After these it has said what it will say, or begins to read weights.
_TOO_LATE = (
    "fitting params to free memory took",
    "load_tensors: loading model tensors",
    "llama_server: model loaded",
    "server is listening",
)


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of one engine; without ``accounting``, ``finding`` says in a sentence why there is none."""

    accounting: Accounting | None
    finding: str | None = None


def ask_accounting(
    plan: OffloadPlan,
    engine: EngineBinary,
    *,
    environment: Mapping[str, str],
    extra_args: Sequence[str] = (),
    timeout_seconds: float = _DEADLINE_SECONDS,
) -> Probe:
    """What ``engine`` says ``plan`` takes; never raises for what the engine does, a crash is a finding.

    Takes about 0.3 s and blocks: call it from a thread that lives as long as the process does. Raises what
    ``build_argv`` raises.
    """
    if not engine.flags.intersection(FLAGS["fit"].spellings):
        return Probe(None, f"This engine ({engine.version}) cannot account for memory before it loads.")
    with _private_endpoint() as endpoint:
        argv = build_argv(plan, engine, alias="probe", endpoint=endpoint, key_file=None, extra_args=extra_args)
        name = f"llama-server {engine.version}" if engine.kind == "native" else engine.version
        listener = AccountingReport(name, draft=plan.draft is not None, draft_head=plan.placement.draft_head)
        try:
            exit = _listen(_asking(argv, engine), environment, listener.feed, timeout_seconds)
        except OSError as error:
            return Probe(None, f"The engine cannot be started ({error.strerror}).")
    if (accounting := listener.accounting()) is not None:
        return Probe(accounting)
    return Probe(None, exit.sentence if exit is not None else listener.excuse())


class AccountingReport:
    """Reads the log of one probe line by line; ``feed`` is True once nothing more is to be expected."""

    def __init__(self, version: str, *, draft: bool = False, draft_head: bool = False) -> None:
        self._by = version
        self._model, self._extra = _Table(), _Table()
        self._is_extra = False
        self._draft = draft
        self._draft_head = draft_head
        self._mmproj_bytes: int | None = None
        self._excuse = ""

    def accounting(self) -> Accounting | None:
        """What was said so far; None before the engine has said anything."""
        if self._model.is_empty:
            return None
        devices, host = self._model.rows()
        if self._draft_head:
            # Its weights are in the model's row, and once more in its own.
            extra, extra_host = self._extra.rows()
            by_name = {row.name: row for row in extra}
            devices = tuple(_with_context(row, by_name.get(row.name)) for row in devices)
            host = _with_context(host, extra_host)
        draft = None if self._extra.is_empty or not self._draft else Accounting(self._by, *self._extra.rows())
        return Accounting(self._by, devices, host, self._mmproj_bytes, draft=draft)

    def excuse(self) -> str:
        """Why there is no accounting, in a sentence."""
        said = f": {self._excuse}" if self._excuse else ""
        return f"The engine did not account for its memory{said}."

    def feed(self, line: str) -> bool:
        """Take note of a line, whether JSON or plain."""
        event = _event(line)
        if event is not None and event.get("type") == "fit_memory_breakdown":
            self._table.take(event)
            self._table.is_complete = True
            return self._is_all
        text = str(event.get("msg", "")) if event is not None else line
        if (found := _PROJECTOR.search(text)) is not None:
            self._mmproj_bytes = round(float(found[1]) * _MIB)
        if (found := _EXCUSE.search(text)) is not None:
            self._excuse = found[1].strip()[:300]
        if _TABLE in text:
            self._table.take_line(text)
            return False
        self._table.is_complete = not self._table.is_empty
        self._is_extra = self._is_extra or _EXTRA in text
        return self._is_all or any(late in text for late in _TOO_LATE)

    @property
    def _table(self) -> _Table:
        return self._extra if self._is_extra else self._model

    @property
    def _is_all(self) -> bool:
        """There is a table for every trial; the first one is that of our flags, with one for their draft."""
        wanted = self._extra if self._draft or self._draft_head else self._model
        return wanted.is_complete


class _Table:
    """The rows of one accounting; further ones, of other trials, are not taken once it is complete."""

    def __init__(self) -> None:
        self._devices: dict[str, AccountedMemory] = {}
        self._host: dict[str, AccountedMemory] = {}
        self.is_complete = False

    @property
    def is_empty(self) -> bool:
        return not self._devices and not self._host

    def rows(self) -> tuple[tuple[AccountedMemory, ...], AccountedMemory]:
        """The devices, and RAM as the sum of its kinds."""
        ram = self._host.values()
        host = AccountedMemory(
            "host",
            weights_bytes=sum(row.weights_bytes for row in ram),
            context_bytes=sum(row.context_bytes for row in ram),
            compute_bytes=sum(row.compute_bytes for row in ram),
        )
        return tuple(self._devices.values()), host

    def take(self, event: Mapping[str, object]) -> None:
        """The rows of an event."""
        if self.is_complete:
            return
        data = event.get("data")
        rows = data.get("rows") if isinstance(data, dict) else None
        for row in rows if isinstance(rows, list) else []:
            with suppress(KeyError, TypeError, ValueError):
                sizes = [int(row[part]) * _MIB for part in ("model", "context", "compute")]
                kept = self._devices if row["kind"] == "device" else self._host
                kept[row["name"]] = AccountedMemory(row["name"], *sizes)

    def take_line(self, text: str) -> None:
        """A row of the table in the log."""
        if self.is_complete:
            return
        for pattern, kept in ((_DEVICE_ROW, self._devices), (_HOST_ROW, self._host)):
            if (found := pattern.search(text)) is not None:
                kept[found[1]] = AccountedMemory(found[1], *(int(found[part]) * _MIB for part in (2, 3, 4)))
                return


def _with_context(row: AccountedMemory, extra: AccountedMemory | None) -> AccountedMemory:
    if extra is None:
        return row
    return replace(
        row,
        context_bytes=row.context_bytes + extra.context_bytes,
        compute_bytes=row.compute_bytes + extra.compute_bytes,
    )


def _event(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _asking(argv: Sequence[str], engine: EngineBinary) -> list[str]:
    """The command of a load, turned into one that accounts first: only then does the engine's ``--fit`` look."""
    asking = list(argv)
    position = next(index for index, part in enumerate(asking) if part in FLAGS["fit"].spellings)
    asking[position + 1] = "on"
    if "--log-jsonl" in engine.flags:
        asking.append("--log-jsonl")
    return asking


@contextmanager
def _private_endpoint() -> Iterator[Endpoint]:
    """It listens before it accounts: on a socket in a folder that nobody else may enter."""
    with tempfile.TemporaryDirectory(prefix="llama-gateway-", ignore_cleanup_errors=True) as folder:
        yield Endpoint(socket=Path(folder) / "p.sock") if sys.platform != "win32" else Endpoint(port=0)


def _listen(
    argv: Sequence[str], environment: Mapping[str, str], feed: Callable[[str], bool], timeout_seconds: float
) -> EngineExit | None:
    """Run ``argv`` until ``feed`` has heard enough; how it ended when it ended by itself, else None."""
    output = EngineOutput()
    with subprocess.Popen(
        dying_with_us(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        creationflags=creation_flags(),
    ) as process:
        assert process.stdout is not None
        expired = threading.Event()
        deadline = threading.Timer(timeout_seconds, _expire, (process, expired))
        deadline.start()
        try:
            while chunk := os.read(process.stdout.fileno(), _CHUNK_BYTES):
                if any(feed(line) for line in output.feed(chunk)):
                    return None
            returncode = process.wait(timeout_seconds)
            return EngineExit(None, Cause.HANG, State.STARTING) if expired.is_set() else _ending(returncode, output)
        finally:
            deadline.cancel()
            end(process)


def _ending(returncode: int, output: EngineOutput) -> EngineExit:
    output.close()
    lines = [_plain(line) for line in output.tail(_EXIT_LINES)]
    cause = cause_of_death(returncode=returncode, phase=State.STARTING, lines=lines)
    return EngineExit(returncode, cause, State.STARTING, tuple(lines))


def _plain(line: str) -> str:
    event = _event(line)
    return line if event is None else str(event.get("msg", "")).rstrip("\n")


def _expire(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    end(process)
