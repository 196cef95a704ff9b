"""``llama-gateway plan``: show a placement without starting anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from app.engine.binary import EngineBinary, find_engine
from app.engine.command import Endpoint, build_argv
from app.errors import ConfigError, EngineUnusable
from app.gguf import read_header
from app.hardware import Device, Machine, probe_machine
from app.offload import OffloadPlan, Wish, plan_offload

_KV_CACHES = ("auto", "f16", "q8_0", "q4_0")
_SIZE = TypeAdapter(ByteSize)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of the command, as given."""

    file: Path
    mmproj: Path | None
    vram: str | None
    ram: str | None
    context: int | None
    parallel: int
    kv_cache: str
    engine: str


def print_plan(request: PlanRequest, *, as_json: bool) -> None:
    """Print the plan; raises ModelFileError, ConfigError, or DoesNotFit with the numbers."""
    if request.kv_cache not in _KV_CACHES:
        raise ConfigError(f"--kv-cache {request.kv_cache} is unknown; use one of {', '.join(_KV_CACHES)}.")
    facts = read_header(request.file)
    projector = read_header(request.mmproj) if request.mmproj is not None else None
    # A machine that is described whole needs no engine to be looked at.
    engine = _engine(request)
    machine = _described(request, probe_machine(engine.device_list() if engine and request.vram is None else ""))
    wish = Wish(context=request.context, parallel=request.parallel, kv_cache=request.kv_cache)
    plan = plan_offload(facts, machine, wish, mmproj=projector)
    argv = _argv(plan, engine) if engine is not None else ()
    if as_json:
        typer.echo(orjson.dumps(plan.document(argv=argv), option=orjson.OPT_INDENT_2))
        return
    for line in plan.summary():
        typer.echo(line)
    for reason in plan.reasons:
        typer.echo(f"  {reason.setting} = {reason.value}: {reason.because}")
    if argv:
        typer.echo("\n" + " ".join(argv))


def _engine(request: PlanRequest) -> EngineBinary | None:
    """The engine whose flags the command line is made for; none is needed for a described machine."""
    try:
        return find_engine(request.engine)
    except EngineUnusable:
        if request.vram is None:
            raise
        return None


def _argv(plan: OffloadPlan, engine: EngineBinary) -> tuple[str, ...]:
    """The command line as a person would type it: a port instead of our private socket."""
    endpoint = Endpoint(socket=None, port=8080)
    return build_argv(plan, engine, alias=plan.model.path.stem, endpoint=endpoint, key_file=None)


def _described(request: PlanRequest, machine: Machine) -> Machine:
    if request.vram is not None:
        sizes = [_size("--vram", part) for part in request.vram.split(",")]
        devices = tuple(
            Device(name=f"CUDA{index}", description="as described by --vram", total_bytes=size, free_bytes=size)
            for index, size in enumerate(size for size in sizes if size)
        )
        machine = replace(machine, devices=devices)
    if request.ram is not None:
        size = _size("--ram", request.ram)
        machine = replace(machine, ram_total_bytes=max(size, machine.ram_total_bytes), ram_available_bytes=size)
    return machine


def _size(option: str, text: str) -> int:
    try:
        return int(_SIZE.validate_python(text.strip()))
    except ValidationError:
        raise ConfigError(f"{option} {text!r} is not a size; write it like 8GiB.") from None
