"""``llama-gateway plan``: show a placement without loading anything."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TypedDict

import typer

from app.cache_folder import cache_dir
from app.engine.binary import EngineBinary, find_engine
from app.engine.command import Endpoint, build_argv, knows_moe_cache
from app.engine.environment import child_environment
from app.engine.flag_table import FlagTable
from app.errors import ConfigError, DoesNotFit, EngineUnusable
from app.gguf import Kind, ModelFacts, natural_kind, needed_pooling, read_header, read_projector
from app.hardware import Device, Machine, probe_machine
from app.offload import OffloadPlan, Wish, plan_offload

_KV_CACHES = ("auto", "f16", "q8_0", "q4_0")
_KINDS = ("auto", *Kind)
# The units of the configuration's sizes; pydantic, which reads those, takes longer to import than a plan takes.
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt]?)(i?)b?)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


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
    gpu_layers: int | None = None
    cpu_moe_layers: int | None = None
    verify: bool = False
    explain: bool = False
    draft: str | None = None
    kind: str = "auto"

    def wish(self, facts: ModelFacts) -> Wish:
        """What is asked of the planner; what the model is for is told by its file unless ``kind`` is set."""
        kind = natural_kind(facts) if self.kind == "auto" else Kind(self.kind)
        return Wish(
            context=self.context,
            parallel=self.parallel,
            kv_cache=self.kv_cache,
            gpu_layers=self.gpu_layers,
            cpu_moe_layers=self.cpu_moe_layers,
            draft_head=self.draft == "head",
            embedding=kind is not Kind.CHAT,
            pooling=needed_pooling(kind, facts),
        )

    def beside(self) -> _Beside:
        """The headers of the files that go with the model; raises ModelFileError."""
        draft = None if self.draft in {None, "head"} else read_header(Path(str(self.draft)))
        return _Beside(mmproj=read_projector(self.mmproj) if self.mmproj is not None else None, draft=draft)


class _Beside(TypedDict):
    mmproj: ModelFacts | None
    draft: ModelFacts | None


def print_plan(request: PlanRequest, *, as_json: bool) -> None:
    """Print the plan; raises ModelFileError, ConfigError, or DoesNotFit with the numbers after what would fit."""
    _check("--kv-cache", request.kv_cache, _KV_CACHES)
    _check("--kind", request.kind, _KINDS)
    with ThreadPoolExecutor(max_workers=1) as pool:
        # The engine looks at the devices while we read.
        asked = pool.submit(_engine_and_machine, request)
        facts = read_header(request.file)
        beside = request.beside()
        engine, machine = asked.result()
    try:
        plan = _plan(request, facts, machine, engine, beside)
    except DoesNotFit:
        _print(_offers(facts, machine, request.wish(facts), beside), err=True)
        raise
    argv = _argv(plan, engine) if engine is not None else ()
    if as_json:
        typer.echo(json.dumps(plan.document(argv=argv), indent=2, ensure_ascii=False))
        return
    _print(_explanation(plan) if request.explain else _short(plan))
    if argv:
        typer.echo("\n" + " ".join(argv))


def _plan(
    request: PlanRequest,
    facts: ModelFacts,
    machine: Machine,
    engine: EngineBinary | None,
    beside: _Beside,
) -> OffloadPlan:
    if not request.verify:
        wish = replace(request.wish(facts), moe_cache=engine is not None and knows_moe_cache(engine))
        return plan_offload(facts, machine, wish, **beside)
    if engine is None:
        raise EngineUnusable("--verify needs an engine to ask and there is none; install one, or leave --verify away.")
    return _verified(engine, facts, machine, request.wish(facts), beside)


# What most calls do without is imported by those that need it: it would be a sixth of the time that a plan takes.


def _verified(engine: EngineBinary, facts: ModelFacts, machine: Machine, wish: Wish, beside: _Beside) -> OffloadPlan:
    verifier = import_module("app.engine.verify").PlanVerifier(engine, environment=child_environment(os.environ))
    plan: OffloadPlan = verifier.plan(facts, machine, wish, **beside)
    return plan


def _offers(facts: ModelFacts, machine: Machine, wish: Wish, beside: _Beside) -> Iterable[str]:
    found = import_module("app.offload.alternatives").alternatives(facts, machine, wish, **beside)
    lines: Iterable[str] = import_module("app.cli.drawing").offers(found)
    return lines


def _explanation(plan: OffloadPlan) -> Iterable[str]:
    lines: Iterable[str] = import_module("app.cli.drawing").explanation(plan)
    return lines


def _short(plan: OffloadPlan) -> Iterable[str]:
    yield from plan.summary()
    for reason in plan.reasons:
        yield f"  {reason.setting} = {reason.value}: {reason.because}"


def _print(lines: Iterable[str], *, err: bool = False) -> None:
    for line in lines:
        typer.echo(line, err=err)


def _engine_and_machine(request: PlanRequest) -> tuple[EngineBinary | None, Machine]:
    engine = _engine(request)
    return engine, _machine(request, engine)


def _engine(request: PlanRequest) -> EngineBinary | None:
    """The engine whose flags the command line is made for; none is needed for a described machine."""
    try:
        return find_engine(request.engine, flag_table=_flag_table())
    except EngineUnusable:
        if request.vram is None:
            raise
        return None


def _flag_table() -> FlagTable | None:
    try:
        return FlagTable(cache_dir() / "engine-flags.json")
    except RuntimeError:
        return None


def _argv(plan: OffloadPlan, engine: EngineBinary) -> tuple[str, ...]:
    """The command line as a person would type it: a port instead of our private socket."""
    endpoint = Endpoint(socket=None, port=8080)
    return build_argv(plan, engine, alias=plan.model.path.stem, endpoint=endpoint, key_file=None)


def _machine(request: PlanRequest, engine: EngineBinary | None) -> Machine:
    """This machine, or what is described of another; a described one is looked at only to be asked about."""
    look = engine is not None and (request.vram is None or request.verify)
    machine = probe_machine(engine.device_list() if engine is not None and look else "")
    if request.vram is not None:
        machine = replace(machine, devices=_described_devices(request.vram, machine))
    if request.ram is not None:
        size = _size("--ram", request.ram)
        machine = replace(machine, ram_total_bytes=max(size, machine.ram_total_bytes), ram_available_bytes=size)
    return machine


def _described_devices(vram: str, machine: Machine) -> tuple[Device, ...]:
    """Devices of the described sizes, named as real ones where there are any, so that the engine knows them."""
    sizes = [size for size in (_size("--vram", part) for part in vram.split(",")) if size]
    names = [device.name for device in machine.devices][: len(sizes)]
    names += [f"CUDA{index}" for index in range(len(names), len(sizes))]
    return tuple(
        Device(name=name, description="as described by --vram", total_bytes=size, free_bytes=size)
        for name, size in zip(names, sizes, strict=True)
    )


def _check(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option} {value} is unknown; use one of {', '.join(known)}.")


def _size(option: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} {text!r} is not a size; write it like 8GiB.")
    number, prefix, binary = found.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])
