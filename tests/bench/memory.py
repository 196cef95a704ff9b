"""The ledger against the engine's own accounting, configuration by configuration: ``python -m tests.bench.memory``.

Needs a native llama-server (GATEWAY_TEST_ENGINE or on PATH), a Vulkan device (a software one will do) and gcc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from app.engine.accounting import ask_accounting
from app.engine.binary import EngineBinary, find_engine
from app.engine.environment import child_environment
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine
from app.memory import Accounting, MemoryLedger, MemoryModel
from app.offload import Expected, OffloadPlan, Wish
from tests import projector_shapes
from tests.bench.memory_cases import MODELS, Case, cases, random_cases
from tests.gguf_writer import write

_MIB = 1 << 20
_SHIM = Path(__file__).with_name("vkshim.c")
_DEFAULT_ENGINE = "/opt/llama-gateway-engine/bin/llama-server"
# What is promised: parts that are sums within 1 %, a device never under by more than 1 % nor over by more than 6 %.
_EXACT, _UNDER, _OVER = 0.01, -0.01, 0.06
# The engine rounds each figure to a MiB.
_ROUNDING_BYTES = 3 * _MIB // 2


@dataclass(frozen=True)
class Row:
    """One place of a configuration, planned and as the engine counts it; RAM is ``index`` -1."""

    case: Case
    ledger: MemoryLedger
    accounting: Accounting
    index: int

    @property
    def planned(self) -> tuple[int, int, int]:
        """Weights with experts, caches with states, compute."""
        ledger = self.ledger.devices[self.index] if self.index >= 0 else self.ledger.host
        return (
            ledger.weights_bytes + ledger.experts_bytes,
            ledger.kv_cache_bytes + ledger.state_bytes,
            ledger.compute_bytes,
        )

    @property
    def counted(self) -> tuple[int, int, int]:
        """The same from the engine."""
        row = self.accounting.devices[self.index] if self.index >= 0 else self.accounting.host
        return row.weights_bytes, row.context_bytes, row.compute_bytes

    @property
    def error(self) -> float:
        """Relative error of the total."""
        return sum(self.planned) / sum(self.counted) - 1

    @property
    def is_kept(self) -> bool:
        """Whether this configuration keeps what is promised."""
        exact = zip(self.planned[:2], self.counted[:2], strict=True)
        return all(_close(own, engine) for own, engine in exact) and _UNDER <= self.error <= _OVER

    def text(self) -> str:
        """A row of the table in the documentation."""
        parts = [
            f"{own / _MIB:,.0f} / {engine / _MIB:,.0f}" for own, engine in zip(self.planned, self.counted, strict=True)
        ]
        host = self.accounting.host
        own_host = self.ledger.host.needed_bytes
        parts += [f"{self.error:+.1%}" if self.is_kept else f"**{self.error:+.1%}**"]
        parts += [f"{own_host / _MIB:,.0f} / {host.total_bytes / _MIB:,.0f}" if self.case.device else ""]
        place = f", device {self.index}" if self.case.placement.tensor_split else ""
        return " | ".join(["", self.case.model, _settings(self.case) + place, *parts, ""]).strip()


def _close(own_bytes: int, engine_bytes: int) -> bool:
    return abs(own_bytes - engine_bytes) <= max(engine_bytes * _EXACT, _ROUNDING_BYTES)


def _settings(case: Case) -> str:
    placement = case.placement
    parts = [f"{placement.context_per_request // 1024}k", placement.kv_cache_k.value]
    parts += [f"np {placement.parallel}"] if placement.parallel > 1 else []
    parts += [f"ub {placement.ubatch}"] if placement.ubatch != 512 else []
    if not case.device:
        return " ".join([*parts, "CPU"])
    parts += [f"ngl {placement.gpu_layers}"] if placement.gpu_layers < 999 else []
    parts += [f"ncmoe {placement.cpu_moe_layers}"] if placement.cpu_moe_layers else []
    parts += [f"ts {','.join(f'{share:g}' for share in placement.tensor_split)}"] if placement.tensor_split else []
    parts += ["projector"] if case.projector else []
    parts += ["draft head"] if placement.draft_head else []
    return " ".join(parts)


def build_shim(folder: Path) -> Path:
    """The preloaded library that raises a software device's buffer limit; raises CalledProcessError without gcc."""
    library = folder / "vkshim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, _SHIM, "-ldl"], check=True)
    return library


def measure(engine: EngineBinary, chosen: Sequence[Case], folder: Path) -> Iterator[Row]:
    """Ask ledger and engine about every case; raises SystemExit when the engine does not answer."""
    environment = child_environment(os.environ) | {"LD_PRELOAD": str(build_shim(folder))}
    facts = {
        name: read_header(write(folder / f"{number}.gguf", build()))
        for number, (name, build) in enumerate(MODELS.items())
        if any(case.model == name for case in chosen)
    }
    projector = read_header(write(folder / "mmproj.gguf", projector_shapes.siglip()))
    for case in chosen:
        plan = plan_of(case, facts[case.model], projector if case.projector else None)
        count = len(plan.machine.devices)
        # The same software device as often as the case has devices.
        visible = {"GGML_VK_VISIBLE_DEVICES": ",".join("0" * max(1, count))}
        probe = ask_accounting(plan, engine, environment=environment | visible)
        if probe.accounting is None:
            raise SystemExit(f"{case.model}, {_settings(case)}: {probe.finding}")
        yield from (Row(case, plan.memory, probe.accounting, index) for index in (range(count) if count else (-1,)))


def plan_of(case: Case, facts: ModelFacts, projector: ModelFacts | None) -> OffloadPlan:
    """A plan that was not chosen but is asked about."""
    count = max(1, len(case.placement.tensor_split)) if case.device else 0
    devices = tuple(Device(f"Vulkan{index}", "", 0, 0) for index in range(count))
    model = MemoryModel(facts, mmproj=projector, draft_head=case.placement.draft_head)
    return OffloadPlan(
        model=facts,
        machine=Machine(devices, 0, 0, case.placement.threads),
        placement=case.placement,
        memory=model.ledger(case.placement, device_names=[device.name for device in devices]),
        expected=Expected(None, None, ""),
        reasons=(),
        wish=Wish(),
        mmproj=projector,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 when every configuration keeps what is promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default=os.environ.get("GATEWAY_TEST_ENGINE") or _DEFAULT_ENGINE)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N settings at random instead of the table")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    source = random_cases(options.random, options.seed) if options.random else cases()
    chosen = [case for case in source if options.only in case.model]
    engine = find_engine(options.engine)
    print("| model | settings | weights | caches | compute | total | RAM |\n|---|---|--:|--:|--:|--:|--:|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(engine, chosen, Path(folder)):
            print(row.text(), flush=True)
            rows.append(row)
    errors = sorted(row.error for row in rows)
    kept = sum(row.is_kept for row in rows)
    print(
        f"\n{engine.version}: {kept} of {len(rows)} within bounds; error of the total {errors[0]:+.1%} to "
        f"{errors[-1]:+.1%}, median of its size {median(abs(error) for error in errors):.1%}"
    )
    return 0 if kept == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
