"""``llama-gateway doctor``: what this machine has for running models, and what is wrong with it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app import __version__
from app.engine.binary import EngineBinary, find_engine
from app.engine.flags import FLAGS
from app.errors import EngineUnusable
from app.hardware import Machine, cpu_features, device_memory, open_files_limit, probe_machine

_MIB, _GIB = 1 << 20, 1 << 30
# A connection for each client and each engine, and room.
_ENOUGH_FILES = 1024
# The process, a small model and its caches.
_LEAST_RAM_BYTES = 2 * _GIB
_NONE = "there is none on PATH"
# What the engine reads besides its arguments, and what it says with them is not in our plans.
_ENGINE_CONFIGURATIONS = ("/etc/llama.cpp/config.ini", "~/.config/llama.cpp/config.ini")
_FASTEST_PLAIN_FEATURES = frozenset({"AVX2", "FMA"})


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, in a sentence, and what to do about it."""

    about: str
    finding: str
    cure: str


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that was looked for: ``chosen`` is the one that would be used; ``failure`` says why it cannot be."""

    setting: str
    chosen: bool = False
    path: str | None = None
    version: str | None = None
    flags: int = 0
    missing_flags: tuple[str, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was found, and what is wrong with it."""

    engines: tuple[Engine, ...]
    machine: Machine
    drivers: tuple[str, ...]
    cpu: tuple[str, ...]
    open_files: int | None
    problems: tuple[Problem, ...]

    def document(self) -> dict[str, Any]:
        """The findings as JSON; sizes in bytes."""
        return {
            "version": __version__,
            "python": sys.version.split()[0],
            "engines": [asdict(engine) for engine in self.engines],
            "devices": [asdict(device) for device in self.machine.devices],
            "drivers": list(self.drivers),
            "cpu_features": list(self.cpu),
            "threads": self.machine.threads,
            "ram_total_bytes": self.machine.ram_total_bytes,
            "ram_available_bytes": self.machine.ram_available_bytes,
            "open_files": self.open_files,
            "problems": [asdict(problem) for problem in self.problems],
        }


def examine(setting: str, *, environment: Mapping[str, str] = os.environ) -> Findings:
    """Look at everything that serving depends on; starts engines to ask them, loads nothing. Takes seconds."""
    chosen, failure = _ask(setting)
    engines = tuple(_engines(setting, chosen, failure))
    devices, device_problem = _device_list(chosen)
    machine = probe_machine(devices)
    drivers = tuple(f"{driver.name} ({driver.total_bytes / _MIB:,.0f} MiB)" for driver in device_memory())
    cpu, files = cpu_features(), open_files_limit()
    problems = [
        *_engine_problems(chosen, failure, engines),
        *([device_problem] if device_problem is not None else []),
        *_device_problems(machine, drivers, chosen),
        *_machine_problems(machine, cpu, files),
        *_environment_problems(environment),
    ]
    return Findings(engines, machine, drivers, cpu, files, tuple(problems))


def report(found: Findings) -> Iterator[str]:
    """The findings for a person, problems last."""
    yield f"llama-gateway {__version__}, Python {sys.version.split()[0]}"
    for engine in found.engines:
        mark = "used" if engine.chosen else "not used"
        told = engine.failure or f"{engine.version}, {engine.flags} flags known"
        yield f"engine   {engine.setting} ({mark}): {told}"
        if engine.missing_flags:
            yield f"         without {', '.join(engine.missing_flags)}"
    for device in found.machine.devices:
        sizes = f"{device.free_bytes / _MIB:,.0f} of {device.total_bytes / _MIB:,.0f} MiB free"
        yield f"device   {device.name}: {device.description}, {sizes}"
    yield from ([] if found.machine.devices else ["device   none that the engine sees"])
    yield f"driver   {', '.join(found.drivers) or 'none of NVIDIA or AMD'}"
    yield f"cpu      {found.machine.threads} threads worth using; {', '.join(found.cpu) or 'features unknown'}"
    ram = found.machine
    yield f"memory   {ram.ram_available_bytes / _MIB:,.0f} of {ram.ram_total_bytes / _MIB:,.0f} MiB of RAM available"
    yield f"limits   {'unknown' if found.open_files is None else found.open_files} open files"
    yield ""
    for problem in found.problems:
        yield f"problem  {problem.about}: {problem.finding}"
        yield f"         {problem.cure}"
    yield from ([] if found.problems else ["No problem found."])


def _ask(setting: str) -> tuple[EngineBinary | None, str | None]:
    try:
        return find_engine(setting), None
    except EngineUnusable as error:
        return None, error.message


def _engines(setting: str, chosen: EngineBinary | None, failure: str | None) -> Iterator[Engine]:
    """The engine that is used first, then the other one that ``auto`` may choose."""
    yield _described(setting, chosen, failure, chosen=True)
    for other in ("llama-server", "embedded"):
        kind = "native" if other == "llama-server" else other
        if setting != "auto" or (chosen is not None and chosen.kind == kind):
            continue
        if other == "llama-server" and shutil.which(other) is None:
            yield Engine(other, failure=_NONE)
        else:
            yield _described(other, *_ask(other), chosen=False)


def _described(setting: str, engine: EngineBinary | None, failure: str | None, *, chosen: bool) -> Engine:
    if engine is None:
        return Engine(setting, failure=failure)
    missing = (
        flag.spellings[0]
        for name, flag in FLAGS.items()
        if name not in _REPLACED and engine.flags.isdisjoint(flag.spellings)
    )
    return Engine(setting, chosen, str(engine.path), engine.version, len(engine.flags), tuple(missing))


# Older words for what another flag says now.
_REPLACED = frozenset({"no_mmap", "mlock", "draft_context"})


def _device_list(engine: EngineBinary | None) -> tuple[str, Problem | None]:
    if engine is None:
        return "", None
    try:
        return engine.device_list(), None
    except EngineUnusable as error:
        cure = "Start it by hand with --list-devices; often the driver and the build do not match."
        return "", Problem("devices", error.message, cure)


def _engine_problems(
    chosen: EngineBinary | None, failure: str | None, engines: tuple[Engine, ...]
) -> Iterator[Problem]:
    if chosen is None:
        yield Problem("engine", failure or "there is none", "Nothing can be served before that is mended.")
        return
    if "--fit" in engines[0].missing_flags:
        yield Problem(
            "engine",
            "it is too old to say what it will take before it loads, so plans rest on formulas alone",
            "Install a llama-server of December 2025 or later.",
        )
    for other in engines[1:]:
        if other.setting == "llama-server" and other.failure not in {None, _NONE}:
            yield Problem("engine", str(other.failure), "Until then the embedded engine serves, on the CPU alone.")


def _device_problems(machine: Machine, drivers: tuple[str, ...], chosen: EngineBinary | None) -> Iterator[Problem]:
    if drivers and not machine.devices and chosen is not None:
        what = "embedded engine" if chosen.kind == "embedded" else "engine"
        yield Problem(
            "devices",
            f"the driver sees {', '.join(drivers)}, but the {what} sees no device",
            "Install a llama-server built for it (CUDA, ROCm or Vulkan) and put it on PATH or in engine.binary.",
        )
    for device in machine.devices:
        if device.free_bytes < device.total_bytes // 4:
            yield Problem(
                "devices",
                f"{device.name} has only {device.free_bytes / _MIB:,.0f} of {device.total_bytes / _MIB:,.0f} MiB free",
                "Close what else uses it: plans are made for what is free.",
            )


def _machine_problems(machine: Machine, cpu: tuple[str, ...], files: int | None) -> Iterator[Problem]:
    if machine.ram_available_bytes < _LEAST_RAM_BYTES:
        yield Problem(
            "memory",
            f"only {machine.ram_available_bytes / _MIB:,.0f} MiB of RAM are available, and 2 GiB are kept in reserve",
            "Free some, raise the limit of the container, or lower memory.ram_reserve.",
        )
    if cpu and not set(cpu) >= _FASTEST_PLAIN_FEATURES:
        yield Problem(
            "cpu",
            f"it has no {' and no '.join(sorted(_FASTEST_PLAIN_FEATURES - set(cpu)))}",
            "A virtual machine may hide them: let it pass the host's CPU through; else use a build for this CPU.",
        )
    if files is not None and files < _ENOUGH_FILES:
        yield Problem(
            "limits",
            f"a process may open only {files} files, each connection being one",
            "Raise it: `ulimit -n 4096`, or LimitNOFILE= in the unit.",
        )


def _environment_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    for name in sorted(name for name in environment if re.match(r"LLAMA_ARG_", name)):
        yield Problem(
            "environment", f"{name} is set, which engines of ours do not get", "Set what it means in the configuration."
        )
    for name in _ENGINE_CONFIGURATIONS:
        with suppress(RuntimeError, OSError):
            if Path(name).expanduser().is_file():
                yield Problem(
                    "environment",
                    f"{name} adds settings to every engine, also to ours, and plans do not know them",
                    "Move what is in there to extra_args, or remove the file.",
                )
