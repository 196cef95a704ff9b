"""A plan is what the engine confirms: asked about, corrected once, remembered."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.accounting import ask_accounting
from app.engine.binary import EngineBinary, find_engine
from app.engine.environment import child_environment
from app.engine.learned import LearnedCorrections, content_hash, learned_key
from app.engine.report import BufferKind, MeasuredBuffer, MeasuredMemory
from app.engine.verify import PlanVerifier
from app.errors import DoesNotFit
from app.gguf import ModelFacts, read_header
from app.hardware import Device, Machine, parse_device_list
from app.memory import (
    REGISTRY,
    AccountedMemory,
    Accounting,
    Correction,
    DeviceLedger,
    Family,
    HostLedger,
    MemoryLedger,
    MemoryModel,
    correction_of,
)
from app.offload import OffloadPlan, Wish, plan_offload
from app.offload.confirm import Confirmation
from tests import shapes
from tests.bench.memory import build_shim
from tests.gguf_writer import write

MIB = 1 << 20
GIB = 1 << 30
WISH = Wish(context=8192, kv_cache="f16", vram_reserve_bytes=0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """Every tensor is below 128 MiB, the largest that a software device takes."""
    shape = shapes.mixture(layers=12, embedding=1024, experts=32, expert_feed_forward=512, vocabulary=32000)
    return read_header(write(tmp_path_factory.mktemp("models") / "mixture.gguf", shape))


def machine(free_mib: int, *, name: str = "GPU0", ram_gib: int = 16) -> Machine:
    device = Device(name, "a card", free_mib * MIB, free_mib * MIB)
    return Machine((device,), (ram_gib + 2) * GIB, ram_gib * GIB, threads=2)


def wrong(factor: float) -> Mapping[str, Family]:
    """The registry with a cache of ``factor`` times its true size in one family."""
    true = REGISTRY["qwen3moe"]

    def layer_caches(shape: object) -> object:
        caches = true.layer_caches(shape)  # type: ignore[arg-type]
        return tuple(cache._replace(key=int(cache.key * factor), value=int(cache.value * factor)) for cache in caches)

    return {**REGISTRY, "qwen3moe": replace(true, layer_caches=layer_caches)}  # type: ignore[arg-type]


# --- corrections --------------------------------------------------------------------------------------------------


def ledger(*, weights: int = 1000, kv: int = 100, compute: int = 50, host: int = 200) -> MemoryLedger:
    device = DeviceLedger("GPU0", weights_bytes=weights * MIB, kv_cache_bytes=kv * MIB, compute_bytes=compute * MIB)
    return MemoryLedger((device,), HostLedger(weights_bytes=host * MIB, compute_bytes=10 * MIB))


def said(*, weights: int = 1000, context: int = 100, compute: int = 50, host: int = 200) -> Accounting:
    device = AccountedMemory("GPU0", weights * MIB, context * MIB, compute * MIB)
    return Accounting("an engine", (device,), AccountedMemory("host", host * MIB, 0, 10 * MIB))


@pytest.mark.parametrize(
    "accounting",
    [
        said(),
        said(weights=1002, context=99, compute=51, host=202),
        said(context=250),
        said(weights=700),
        said(compute=400),
        said(compute=10),
        said(host=5000),
        said(weights=30, host=1170),
        said(weights=1, context=900, compute=0, host=0),
    ],
)
def test_a_corrected_ledger_is_what_the_engine_says(accounting: Accounting) -> None:
    corrected = correction_of(ledger(), accounting).applied(ledger())
    device, row = corrected.devices[0], accounting.devices[0]
    assert device.total_bytes == pytest.approx(row.total_bytes, abs=9 * MIB)
    assert corrected.host.needed_bytes == pytest.approx(accounting.host.total_bytes, abs=9 * MIB)


def test_rounding_is_no_difference() -> None:
    assert correction_of(ledger(), said(weights=1002, context=99, compute=52)).is_none


def test_a_cache_that_the_formulas_do_not_know_is_added() -> None:
    correction = correction_of(ledger(kv=0), said(context=300))
    assert correction.applied(ledger(kv=0)).devices[0].total_bytes == 1350 * MIB


def test_a_device_that_holds_nothing_is_not_corrected() -> None:
    empty = MemoryLedger((DeviceLedger("GPU0"),), HostLedger())
    assert Correction(compute_bytes=GIB).applied(empty).devices[0].total_bytes == 0


# --- the conversation with an engine ------------------------------------------------------------------------------


class Scripted:
    """An engine whose word differs from the formulas by a function of the plan."""

    def __init__(self, facts: ModelFacts, on: Machine, differ: Callable[[OffloadPlan], Correction | str]) -> None:
        self.facts, self.machine, self.differ = facts, on, differ
        self.asked: list[OffloadPlan] = []

    def make(self, correction: Correction) -> OffloadPlan:
        return plan_offload(self.facts, self.machine, WISH, correction=correction)

    def ask(self, plan: OffloadPlan) -> Accounting | str:
        self.asked.append(plan)
        difference = self.differ(plan)
        if isinstance(difference, str):
            return difference
        formulas = MemoryModel(self.facts).uncorrected(plan.placement, device_names=["GPU0"])
        true = difference.applied(formulas)
        device, host = true.devices[0], true.host
        row = AccountedMemory(
            "GPU0",
            device.weights_bytes + device.experts_bytes,
            device.kv_cache_bytes + device.state_bytes,
            device.compute_bytes,
        )
        ram = AccountedMemory(
            "host",
            host.weights_bytes + host.experts_bytes,
            host.kv_cache_bytes + host.state_bytes,
            host.compute_bytes,
        )
        return Accounting("a scripted engine", (row,), ram)

    def confirm(self, known: Correction | None = None) -> OffloadPlan:
        return Confirmation(self.make, self.ask, REGISTRY).plan(known or Correction())


def test_a_right_plan_is_confirmed_by_one_question(mixture: ModelFacts) -> None:
    engine = Scripted(mixture, machine(500), lambda _: Correction())
    plan = engine.confirm()
    assert len(engine.asked) == 1
    assert plan.verified is not None
    assert plan.verified.corrections == 0
    assert plan.placement == engine.asked[0].placement
    assert plan.document()["verified"]["by"] == "a scripted engine"
    assert plan.reasons[-1].setting == "verified"


def test_a_plan_that_takes_more_than_thought_is_corrected(mixture: ModelFacts) -> None:
    engine = Scripted(mixture, machine(500), lambda _: Correction(compute_bytes=120 * MIB))
    plan = engine.confirm()
    assert len(engine.asked) == 2
    assert plan.verified is not None
    assert plan.verified.corrections == 1
    assert plan.placement.cpu_moe_layers > engine.asked[0].placement.cpu_moe_layers
    assert plan.memory.devices[0].total_bytes <= 500 * MIB
    # The next time it is known.
    again = Scripted(mixture, machine(500), engine.differ)
    assert again.confirm(plan.correction).placement == plan.placement
    assert len(again.asked) == 1


def test_a_single_mib_too_many_is_no_rounding(mixture: ModelFacts) -> None:
    planned = plan_offload(mixture, machine(500), WISH)
    used = planned.memory.devices[0].total_bytes
    on = Machine((Device("GPU0", "a card", used + MIB, used + MIB),), 18 * GIB, 16 * GIB, threads=2)
    engine = Scripted(mixture, on, lambda _: Correction(compute_bytes=2 * MIB))
    plan = engine.confirm()
    assert plan.verified is not None
    assert plan.memory.devices[0].total_bytes <= used + MIB
    assert plan.placement.cpu_moe_layers == planned.placement.cpu_moe_layers + 1


def test_room_that_was_not_thought_of_is_used(mixture: ModelFacts) -> None:
    engine = Scripted(mixture, machine(500), lambda _: Correction(context=0.3))
    plan = engine.confirm()
    assert plan.placement.cpu_moe_layers < engine.asked[0].placement.cpu_moe_layers
    assert plan.verified is not None


def test_a_better_plan_that_does_not_hold_falls_back_to_the_confirmed_one(mixture: ModelFacts) -> None:
    first: list[OffloadPlan] = []

    def differ(plan: OffloadPlan) -> Correction:
        first.append(plan)
        return Correction(compute_bytes=-20 * MIB) if len(first) == 1 else Correction(compute_bytes=200 * MIB)

    engine = Scripted(mixture, machine(500), differ)
    plan = engine.confirm()
    assert plan.placement == engine.asked[0].placement
    assert plan.verified is not None


def test_an_engine_that_says_nothing_leaves_a_finding(mixture: ModelFacts) -> None:
    engine = Scripted(mixture, machine(500), lambda _: "It crashed.")
    plan = engine.confirm()
    assert (plan.verified, plan.finding) == (None, "It crashed.")
    assert plan.document()["verified"] is None
    assert plan.reasons[-1].because == "It crashed."


def test_an_engine_that_needs_too_much_is_a_refusal(mixture: ModelFacts) -> None:
    engine = Scripted(mixture, machine(500, ram_gib=3), lambda _: Correction(host_weights_bytes=5 * GIB))
    with pytest.raises(DoesNotFit):
        engine.confirm()


def test_the_questions_end(mixture: ModelFacts) -> None:
    grown: list[int] = []

    def differ(_: OffloadPlan) -> Correction:
        grown.append(1)
        return Correction(compute_bytes=len(grown) * 100 * MIB)

    engine = Scripted(mixture, machine(500), differ)
    plan = engine.confirm()
    assert len(engine.asked) == 3
    assert plan.verified is None
    assert "more than may be used" in (plan.finding or "")


def test_a_device_that_refuses_tensors_is_reported(mixture: ModelFacts) -> None:
    engine = Scripted(mixture, machine(4000), lambda _: Correction(weights=0.1, host_weights_bytes=300 * MIB))
    reasons = {reason.setting: reason.because for reason in engine.confirm().reasons}
    assert "cannot take those tensors" in reasons["device"]


# --- what is remembered -------------------------------------------------------------------------------------------

LEARNED = Correction(context=1.5, compute_bytes=7 * MIB, mmproj_bytes=900 * MIB)


def test_corrections_survive_in_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "learned.json"
    LearnedCorrections(path).keep("key", LEARNED, model="a model")
    assert LearnedCorrections(path).find("key") == LEARNED
    assert LearnedCorrections(path).find("another") == Correction()
    entry = json.loads(path.read_text())["corrections"]["key"]
    assert entry["model"] == "a model"
    assert "caches x1.50" in entry["differs"]
    LearnedCorrections(path).keep("key", Correction(), model="a model")
    assert json.loads(path.read_text())["corrections"] == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        '{"format": 99, "corrections": {"key": {"context": 2}}}',
        '{"format": 1, "corrections": []}',
        '{"format": 1, "corrections": {"key": 5}}',
        '{"format": 1, "corrections": {"key": {"context": "much"}}}',
        '{"format": 1, "corrections": {"key": {"context": NaN}}}',
        '{"format": 1, "corrections": {"key": {"context": null}}}',
    ],
)
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "learned.json"
    path.write_text(text)
    learned = LearnedCorrections(path)
    assert learned.find("key") == Correction()
    learned.keep("key", LEARNED, model="m")
    assert learned.find("key") == LEARNED


def test_values_of_the_file_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_text('{"format": 1, "corrections": {"key": {"context": 1e30, "weights": -4, "compute_bytes": 1e300}}}')
    found = LearnedCorrections(path).find("key")
    assert (found.context, found.weights) == (10.0, 0.01)
    assert found.compute_bytes <= 1 << 40


def test_old_entries_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    entries = {f"key {number}": {"context": 2.0} for number in range(400)}
    path.write_text(json.dumps({"format": 1, "corrections": entries}))
    LearnedCorrections(path).keep("new", LEARNED, model="m")
    kept = json.loads(path.read_text())["corrections"]
    assert len(kept) == 256
    assert list(kept)[-1] == "new"


def test_a_folder_that_cannot_be_written_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    LearnedCorrections(tmp_path / "file" / "learned.json").keep("key", LEARNED, model="m")
    assert "Cannot write" in caplog.text


def test_the_key_follows_the_content_not_the_name(mixture: ModelFacts, tmp_path: Path) -> None:
    shape = shapes.mixture(layers=12, embedding=1024, experts=32, expert_feed_forward=512, vocabulary=32000)
    copy = read_header(write(tmp_path / "renamed.gguf", shape))
    assert content_hash(copy) == content_hash(mixture)
    other = read_header(write(tmp_path / "other.gguf", replace(shape, tensors=shape.tensors[:-1])))
    assert content_hash(other) != content_hash(mixture)
    engine = EngineBinary(("x",), "native", Path("x"), "1", 1, frozenset(), "")
    keys = {
        learned_key(mixture, engine, machine(500), WISH),
        learned_key(mixture, replace(engine, version="2"), machine(500), WISH),
        learned_key(mixture, engine, machine(500, name="GPU1"), WISH),
        learned_key(mixture, engine, machine(500), replace(WISH, parallel=2)),
        learned_key(mixture, engine, machine(500), WISH, mmproj=copy),
    }
    assert len(keys) == 5
    assert learned_key(mixture, engine, machine(400), WISH) in keys


def test_what_an_engine_really_took_is_learned_where_it_could_not_be_asked(mixture: ModelFacts, tmp_path: Path) -> None:
    old = EngineBinary(("x",), "native", Path("x"), "1", 1, frozenset(), "")
    verifier = PlanVerifier(old, environment={}, learned_path=tmp_path / "learned.json", families=wrong(3))
    first = verifier.plan(mixture, machine(500), WISH)
    assert first.verified is None
    assert "cannot account" in (first.finding or "")
    true = MemoryModel(mixture).ledger(first.placement, device_names=["GPU0"]).devices[0]
    buffers = (
        MeasuredBuffer("GPU0", BufferKind.MODEL, true.weights_bytes + true.experts_bytes),
        MeasuredBuffer("GPU0", BufferKind.KV, true.kv_cache_bytes),
        MeasuredBuffer("GPU0", BufferKind.COMPUTE, true.compute_bytes),
        MeasuredBuffer("CPU_Mapped", BufferKind.MODEL, 17 * GIB),
    )
    verifier.learn(first, MeasuredMemory(buffers))
    second = verifier.plan(mixture, machine(500), WISH)
    assert second.placement.cpu_moe_layers < first.placement.cpu_moe_layers
    # The buffers of the graph differ between the two placements, which a loaded engine says nothing about.
    right = plan_offload(mixture, machine(500), WISH)
    assert abs(second.placement.cpu_moe_layers - right.placement.cpu_moe_layers) <= 1


# --- a real engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vulkan(native_engine: Path | None) -> Iterator[tuple[EngineBinary, Mapping[str, str], str]]:
    """The native engine, the environment with its software device, and that device's name."""
    if native_engine is None:
        pytest.skip("no native engine")
    with pytest.MonkeyPatch.context() as patch:
        # Software devices are left out unless they are named.
        patch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
        engine = find_engine(str(native_engine))
        devices = parse_device_list(engine.device_list())
        if not devices:
            pytest.skip("the native engine sees no device, not even a software one")
        yield engine, child_environment(os.environ), devices[0].name


@pytest.mark.parametrize("factor", [3.0, 0.2])
def test_a_deliberately_wrong_estimate_corrects_itself(
    vulkan: tuple[EngineBinary, Mapping[str, str], str], mixture: ModelFacts, tmp_path: Path, factor: float
) -> None:
    engine, environment, device = vulkan
    on = machine(500, name=device)
    right = plan_offload(mixture, on, WISH)
    believed = plan_offload(mixture, on, WISH, families=wrong(factor))
    assert believed.placement != right.placement
    path = tmp_path / "learned.json"
    plans = [
        PlanVerifier(engine, environment=environment, learned_path=path, families=wrong(factor)).plan(mixture, on, WISH)
        for _ in range(2)
    ]
    for plan in plans:
        assert plan.placement == right.placement
        assert plan.verified is not None
        assert plan.memory.devices[0].total_bytes == pytest.approx(
            plan.verified.accounting.device(device).total_bytes, abs=4 * MIB
        )
    corrections = [plan.verified.corrections for plan in plans if plan.verified]
    assert corrections[0] in (1, 2)
    assert corrections[1] == 0
    assert f"caches x{1 / factor:.2f}"[:-1] in path.read_text()


def test_a_plan_of_a_described_machine_is_confirmed_by_this_one(
    vulkan: tuple[EngineBinary, Mapping[str, str], str], mixture: ModelFacts
) -> None:
    engine, environment, device = vulkan
    plan = PlanVerifier(engine, environment=environment).plan(mixture, machine(400, name=device), WISH)
    assert plan.verified is not None
    assert plan.verified.corrections == 0
    verified = plan.document()["verified"]
    assert verified["devices"][0]["name"] == device
    assert verified["devices"][0]["planned_bytes"] == pytest.approx(verified["devices"][0]["total_bytes"], rel=0.02)


def test_a_device_that_does_not_exist_is_a_finding(
    vulkan: tuple[EngineBinary, Mapping[str, str], str], mixture: ModelFacts
) -> None:
    engine, environment, _ = vulkan
    plan = PlanVerifier(engine, environment=environment).plan(mixture, machine(400, name="CUDA7"), WISH)
    assert plan.verified is None
    assert plan.finding is not None


def test_no_expert_layer_is_in_ram_that_the_engine_would_take(
    vulkan: tuple[EngineBinary, Mapping[str, str], str], tmp_path: Path
) -> None:
    """The card that people have: 7,600 MiB free, 512 MiB in reserve, a 35B-A3B of 32k tokens."""
    engine, environment, device = vulkan
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to lift the software device's limit with")
    environment = {**environment, "LD_PRELOAD": str(build_shim(tmp_path))}
    facts = read_header(write(tmp_path / "a3b.gguf", shapes.qwen35moe()))
    wish = Wish(context=32768, kv_cache="q8_0")
    on = machine(7600, name=device, ram_gib=30)
    plan = PlanVerifier(engine, environment=environment).plan(facts, on, wish)
    assert plan.placement.cpu_moe_layers == 30
    assert plan.verified is not None
    assert plan.verified.corrections == 0
    one_less = replace(plan, placement=replace(plan.placement, cpu_moe_layers=29, ubatch=512))
    probe = ask_accounting(one_less, engine, environment=environment)
    assert probe.accounting is not None
    assert probe.accounting.device(device).total_bytes > (7600 - 512) * MIB
