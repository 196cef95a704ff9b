"""Plans with the engine's word on them, for whoever starts or shows one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.engine.accounting import ask_accounting
from app.engine.binary import EngineBinary
from app.engine.command import knows_moe_cache
from app.engine.learned import LearnedCorrections, learned_key
from app.engine.report import BufferKind, MeasuredMemory
from app.gguf import ModelFacts
from app.hardware import Machine
from app.memory import (
    REGISTRY,
    AccountedMemory,
    Accounting,
    Correction,
    Family,
    MemoryModel,
    correction_of,
)
from app.offload import OffloadPlan, Wish, plan_offload
from app.offload.confirm import Confirmation, with_word
from app.offload.step_down import Shortage, step_down

_log = logging.getLogger(__name__)


class PlanVerifier:
    """Makes plans, has ``engine`` confirm them, and learns from what it says and from what it really took.

    Without ``learned_path`` nothing is kept; ``families`` replaces formulas in tests.
    """

    def __init__(
        self,
        engine: EngineBinary,
        *,
        environment: Mapping[str, str],
        learned_path: Path | None = None,
        families: Mapping[str, Family] = REGISTRY,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._learned = LearnedCorrections(learned_path) if learned_path is not None else None
        self._families = families

    def plan(
        self,
        facts: ModelFacts,
        machine: Machine,
        wish: Wish,
        *,
        mmproj: ModelFacts | None = None,
        draft: ModelFacts | None = None,
        extra_args: Sequence[str] = (),
    ) -> OffloadPlan:
        """A plan that this engine has confirmed, or one with a finding on why it has not; blocks for about 0.3 s.

        Raises what ``plan_offload`` and ``build_argv`` raise, never anything for what the engine does.
        """

        wish = replace(wish, moe_cache=knows_moe_cache(self._engine))

        def make(correction: Correction) -> OffloadPlan:
            return plan_offload(
                facts, machine, wish, mmproj=mmproj, draft=draft, correction=correction, families=self._families
            )

        def ask(plan: OffloadPlan) -> Accounting | str:
            probe = ask_accounting(plan, self._engine, environment=self._environment, extra_args=extra_args)
            return probe.accounting or probe.finding or "The engine said nothing of its memory."

        key = learned_key(facts, self._engine, machine, wish, mmproj=mmproj, draft=draft)
        known = self._learned.find(key) if self._learned is not None else Correction()
        plan = Confirmation(make, ask, self._families).plan(known)
        if plan.verified is not None:
            self._keep(key, plan, plan.correction)
        else:
            _log.info("%s: the plan is not verified: %s", facts.name, plan.finding)
        if not plan.correction.is_none:
            _log.info("%s: this engine counts differently: %s", facts.name, plan.correction.describe())
        return plan

    def confirm(self, plan: OffloadPlan, *, extra_args: Sequence[str] = ()) -> OffloadPlan:
        """``plan`` with the engine's word on it, or another one for the same wish; see ``plan``."""
        return self.plan(
            plan.model, plan.machine, plan.wish, mmproj=plan.mmproj, draft=plan.draft, extra_args=extra_args
        )

    def step_down(self, plan: OffloadPlan, shortage: Shortage, *, extra_args: Sequence[str] = ()) -> OffloadPlan | None:
        """The next smaller plan, if there is one, with the engine's word on it where it had one on ``plan``."""
        smaller = step_down(plan, shortage, families=self._families)
        if smaller is None or plan.verified is None:
            return smaller
        probe = ask_accounting(smaller, self._engine, environment=self._environment, extra_args=extra_args)
        return with_word(smaller, probe.accounting or probe.finding or "The engine said nothing of its memory.")

    def learn(self, plan: OffloadPlan, measured: MeasuredMemory) -> None:
        """Note what a loaded engine holds against what was planned, for engines that could not be asked before.

        Not with a draft: a loaded engine does not say which buffers are whose.
        """
        if plan.verified is not None or plan.placement.draft_tokens or not measured.buffers:
            return
        names = [device.name for device in plan.machine.devices]
        model = MemoryModel(plan.model, families=self._families)
        correction = correction_of(
            model.uncorrected(plan.placement, device_names=names), accounting_of(measured, self._engine.version)
        )
        key = learned_key(plan.model, self._engine, plan.machine, plan.wish, mmproj=plan.mmproj)
        self._keep(key, plan, correction)

    def _keep(self, key: str, plan: OffloadPlan, correction: Correction) -> None:
        if self._learned is not None:
            self._learned.keep(key, correction, model=plan.model.name)


_PARTS = {
    BufferKind.MODEL: "weights_bytes",
    BufferKind.KV: "context_bytes",
    BufferKind.RS: "context_bytes",
    BufferKind.MOE_CACHE: "context_bytes",
    BufferKind.COMPUTE: "compute_bytes",
    BufferKind.OUTPUT: "compute_bytes",
}


def accounting_of(measured: MeasuredMemory, version: str) -> Accounting:
    """The buffers of a loaded engine in the parts of an accounting."""
    rows: dict[str, dict[str, int]] = {"host": {}}
    for buffer in measured.buffers:
        if buffer.kind not in _PARTS:
            continue  # a projector, which no accounting holds
        row = rows.setdefault("host" if buffer.on_host else buffer.device, {})
        part = _PARTS[buffer.kind]
        row[part] = row.get(part, 0) + buffer.size_bytes
    host = AccountedMemory("host", **rows.pop("host"))
    devices = tuple(AccountedMemory(name, **parts) for name, parts in rows.items())
    return Accounting(f"{version}, after loading", devices, host, exact_host=False)
