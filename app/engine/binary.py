"""Find a llama-server and learn what it can do, without trusting it to behave."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.engine.environment import child_environment
from app.engine.exit_status import Ending, ending_of, name_of
from app.engine.flag_table import Flags, FlagTable
from app.engine.probe import ProbeResult, run_probe
from app.errors import EngineUnusable
from app.hardware import CPU_FEATURES, cpu_features

_log = logging.getLogger(__name__)

_PROBE_SECONDS = 15.0
_DEVICES_SECONDS = 30.0
_INSTEAD_OF_NATIVE = (
    "install the embedded engine (pip install 'llama-gateway[demo]'), "
    "or put a working llama-server on PATH or in engine.binary"
)
_INSTEAD_OF_EMBEDDED = "put a working llama-server on PATH or in engine.binary"
# Run by path, not by module name: a folder called "app" where the gateway is started must not shadow ours.
_EMBEDDED_SCRIPT = Path(__file__).with_name("embedded.py")

# `version: 0.7.0 (build 11669, commit abc)`; before August 2026 `version: 10360 (90e6a9131)`.
_VERSION = re.compile(r"^version: (.+)$", re.MULTILINE)
_BUILD = re.compile(r"\(build (\d+)")
_OLD_BUILD = re.compile(r"^version: (\d+) \(", re.MULTILINE)
# An option starts in column 0: names, a hint for its value, then its help from column 40 on (or on the next line).
_HELP_ROW = re.compile(r"^(-{1,2}[A-Za-z][\w.-]*(?:, +-{1,2}[A-Za-z][\w.-]*)*)(?: (\S+))?")
_REMOVED = "the argument has been removed"
_LOADER_LINE = re.compile(
    r"^.*(?:error while loading shared libraries|cannot open shared object|symbol lookup error|Library not loaded|"
    r"version `[^']+' not found|DLL load failed).*$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class EngineBinary:
    """An engine that answered: how to call it, what it calls itself and which flags it has.

    ``valued_flags`` are those that take a value; ``because`` is one sentence on why this engine was chosen.
    """

    command: tuple[str, ...]
    kind: str
    path: Path
    version: str
    build: int | None
    flags: frozenset[str]
    because: str
    valued_flags: frozenset[str] = frozenset()

    def device_list(self) -> str:
        """What ``--list-devices`` prints, empty when the binary has no such flag; raises EngineUnusable when it fails.

        Bounded at 30 seconds: it creates a context on every device.
        """
        if "--list-devices" not in self.flags:
            return ""
        instead = _INSTEAD_OF_NATIVE if self.kind == "native" else _INSTEAD_OF_EMBEDDED
        candidate = _Candidate(self.command, self.kind, self.path, str(self.path), instead)
        return candidate.run("--list-devices", timeout_seconds=_DEVICES_SECONDS).stdout


def find_engine(setting: str, *, flag_table: FlagTable | None = None) -> EngineBinary:
    """The engine for ``engine.binary``: ``auto``, ``embedded``, or a path; raises EngineUnusable with the cure.

    Runs the candidates, so it takes a second and may block: call it from a thread. ``flag_table`` saves the question
    for the flags of an engine that was asked before.
    """
    table = flag_table
    if setting == "embedded":
        return _embedded("the configuration asks for it", table)
    if setting != "auto":
        return _native(_resolve(setting), "the configuration names it", table)
    found = shutil.which("llama-server")
    if found is None:
        return _embedded("there is no llama-server on PATH", table)
    try:
        return _native(Path(found).absolute(), "it is the llama-server on PATH", table)
    except _Broken as error:
        if not _has_embedded():
            raise
        _log.warning("llama-server on PATH is not used: %s", error.message)
        return _embedded(error.reason, table)


def no_engine() -> EngineBinary:
    """What stands for the engine of a gateway whose models are all on other servers."""
    return EngineBinary((), "none", Path(), "none", None, frozenset(), "no model needs one.")


class _Broken(EngineUnusable):
    """An engine that does not work; ``reason`` is the message without the cure."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(f"{reason}; {cure}.")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An engine that has not answered yet, and how to speak of it."""

    command: tuple[str, ...]
    kind: str
    path: Path
    name: str
    instead: str

    def run(self, flag: str, *, timeout_seconds: float) -> ProbeResult:
        """What it answers to ``flag``; raises EngineUnusable for anything but success."""
        command = (*self.command, flag)
        try:
            result = run_probe(command, environment=child_environment(os.environ), timeout_seconds=timeout_seconds)
        except OSError as error:
            reason, cure = _os_reason(error, self.path)
            raise _Broken(f"{self.name} cannot be started: {reason}", f"{cure} or {self.instead}") from error
        if result.returncode != 0:
            reason, cure = _exit_reason(result, flag, timeout_seconds)
            raise _Broken(f"{self.name} does not work: {reason}", f"{cure} or {self.instead}")
        return result


def _resolve(setting: str) -> Path:
    path = Path(setting).expanduser().absolute()
    if path.exists() or os.sep in setting:
        return path
    found = shutil.which(setting)
    return Path(found).absolute() if found else path


def _has_embedded() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def _embedded_files() -> list[Path]:
    """What the embedded engine is made of; empty where it is not installed."""
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        return []
    # Beside it lies the library with the engine in it.
    folder = Path(found.origin).parent
    return sorted({Path(found.origin), *folder.glob("*.so"), *folder.glob("*.pyd")})


def _native(path: Path, why: str, table: FlagTable | None) -> EngineBinary:
    candidate = _Candidate((str(path),), "native", path, str(path), _INSTEAD_OF_NATIVE)
    return _probe(candidate, (path,), table, because=f"{path} is used, because {why}.")


def _embedded(why: str, table: FlagTable | None) -> EngineBinary:
    files = _embedded_files()
    if not files:
        raise _Broken(f"There is no engine: {why}, and the embedded engine is not installed", _INSTEAD_OF_NATIVE)
    # -P: nothing from the working directory is imported.
    command = (sys.executable, "-P", str(_EMBEDDED_SCRIPT))
    name = "the embedded engine (xllamacpp)"
    candidate = _Candidate(command, "embedded", _EMBEDDED_SCRIPT, name, _INSTEAD_OF_EMBEDDED)
    because = f"The embedded engine (xllamacpp) is used, because {why}."
    return _probe(candidate, (_EMBEDDED_SCRIPT, *files), table, because=because)


def _probe(candidate: _Candidate, program: Sequence[Path], table: FlagTable | None, *, because: str) -> EngineBinary:
    version = candidate.run("--version", timeout_seconds=_PROBE_SECONDS)
    text = version.stderr + "\n" + version.stdout
    named = _VERSION.search(text)
    if named is None:
        raise _Broken(f"{candidate.name} is not a llama-server: its --version prints no version", candidate.instead)
    known = table.find(program, named[1]) if table is not None else None
    flags, valued = known or _asked_flags(candidate)
    if table is not None and known is None:
        table.keep(program, named[1], (flags, valued))
    build = _BUILD.search(text) or _OLD_BUILD.search(text)
    return EngineBinary(
        command=candidate.command,
        kind=candidate.kind,
        path=candidate.path,
        version=named[1].strip(),
        build=int(build[1]) if build else None,
        flags=flags,
        because=because,
        valued_flags=valued,
    )


def _asked_flags(candidate: _Candidate) -> Flags:
    flags, valued = parse_help(candidate.run("--help", timeout_seconds=_PROBE_SECONDS).stdout)
    if "--ctx-size" not in flags:
        raise _Broken(f"{candidate.name} is not a llama-server: its --help lists no --ctx-size", candidate.instead)
    return flags, valued


def parse_help(text: str) -> Flags:
    """The flags that a help text lists, and those among them that take a value; removed ones are left out."""
    flags: set[str] = set()
    valued: set[str] = set()
    for line in text.splitlines():
        row = _HELP_ROW.match(line)
        if row is None or _REMOVED in line:
            continue
        names = re.split(r", +", row[1])
        flags.update(names)
        if row[2]:
            valued.update(names)
    return frozenset(flags), frozenset(valued)


def _os_reason(error: OSError, path: Path) -> tuple[str, str]:
    """Why a program does not even start, and what to do about it."""
    if isinstance(error, FileNotFoundError):
        if path.exists():
            return "the loader or interpreter that it names is missing", "install the build for this system"
        return "there is no such file", "correct engine.binary"
    if isinstance(error, PermissionError):
        if path.is_dir():
            return "it is a folder", "name the program in it"
        return "it is not executable", "run chmod +x on it (and look for noexec on its file system)"
    if error.errno == errno.ENOEXEC:
        return f"it is not a program for this kind of machine ({platform.machine()})", "install the right build"
    return str(error.strerror), "install it again"


def _exit_reason(result: ProbeResult, flag: str, timeout_seconds: float) -> tuple[str, str]:
    """Why a program ended badly, and what to do about it."""
    if result.returncode is None:
        return f"it did not answer {flag} within {timeout_seconds:g} seconds", "try it by hand"
    loader = _LOADER_LINE.search(result.stderr)
    if loader is not None:
        return f"a library is missing ({_quoted(loader[0])})", "install that library"
    ending = ending_of(result.returncode)
    if ending is Ending.ILLEGAL_INSTRUCTION:
        return f"it is built for another CPU{_missing_cpu_flags()}", "install a build for this CPU"
    if ending is Ending.MISSING_LIBRARY:
        return f"it was not started for a {name_of(result.returncode)}", "install what it needs"
    if ending is not None:
        return f"it was killed by {name_of(result.returncode)} when asked for {flag}", "install another build"
    last = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "it printed nothing")
    return f"{flag} ended with exit code {result.returncode} ({_quoted(last)})", "install another build"


def _missing_cpu_flags() -> str:
    present = cpu_features()
    missing = [name for name in CPU_FEATURES if name not in present]
    return f" (this one has no {', '.join(missing)})" if present and missing else ""


def _quoted(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= 300 else text[:297] + "..."
