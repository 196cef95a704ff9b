"""The parts of the status page that need no browser: the memory map, the plots, the sentences, who may see what."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.backends import Circuit
from app.config import ModelCatalog
from app.engine.process import State
from app.engine.report import BufferKind, MeasuredBuffer, MeasuredMemory
from app.events import Event, EventKind
from app.gguf import read_header
from app.hardware import Device, DeviceMemory, Machine
from app.offload import OffloadPlan, Reason, Wish, plan_offload
from app.supervisor import Failure, ModelStatus
from app.views.bars import pieces, rows
from app.views.history import KEPT_SECONDS, History, Point, Totals, sums
from app.views.memory_map import RAM, Place, Resident, memory_map
from app.views.plot import HEIGHT, WIDTH, plot
from app.views.snippets import snippets
from app.views.why import why
from tests.fleet import settings_for

MIB = 1 << 20


# --- the memory map ---------------------------------------------------------------------------------------------------


def plan_on(model: Path, *, devices: Sequence[Device] = ()) -> OffloadPlan:
    machine = Machine(tuple(devices), 16 << 30, 8 << 30, 2)
    return plan_offload(read_header(model), machine, Wish(context=512, parallel=1, ram_reserve_bytes=0))


def buffers(*parts: tuple[str, BufferKind, int]) -> MeasuredMemory:
    return MeasuredMemory(tuple(MeasuredBuffer(device, kind, size * MIB) for device, kind, size in parts))


def mapped(residents: Sequence[Resident], drivers: Sequence[DeviceMemory] = ()) -> dict[str, Place]:
    places = memory_map(
        residents,
        ram_total_bytes=16 << 30,
        ram_available_bytes=12 << 30,
        ram_reserve_bytes=1 << 30,
        vram_reserve_bytes=512 * MIB,
        drivers=drivers,
    )
    return {place.name: place for place in places}


def test_what_is_planned_is_what_the_plan_says(demo_model: Path) -> None:
    gpu = Device("CUDA0", "NVIDIA Test", 8 << 30, 7 << 30)
    plan = plan_on(demo_model, devices=[gpu])
    places = mapped([Resident("a", plan, None, 0)])
    document = plan.document()["memory"]
    (on_device,) = document["devices"]
    for place, ledger in ((places["CUDA0"], on_device), (places[RAM], document["host"])):
        planned = {f"{portion.part}_bytes": portion.size_bytes for portion in place.planned}
        parts = {name: size for name, size in ledger.items() if name.endswith("_bytes") and size}
        for derived in ("total_bytes", "left_bytes", "reserve_bytes"):
            parts.pop(derived, None)
        assert planned == parts
        assert place.planned_bytes == ledger["total_bytes"]
    # Nothing says what is in use now: what was not free when the plan was made counts as others'.
    assert places["CUDA0"].others_bytes == 1 << 30
    assert places["CUDA0"].left_bytes == on_device["left_bytes"]


def test_measured_buffers_lie_where_the_engine_put_them(demo_model: Path) -> None:
    plan = plan_on(demo_model, devices=[Device("CUDA0", "NVIDIA Test", 8 << 30, 7 << 30)])
    measured = buffers(
        ("CUDA0", BufferKind.MODEL, 100),
        ("CUDA0", BufferKind.KV, 10),
        ("CPU_Mapped", BufferKind.MODEL, 40),
        ("CUDA_Host", BufferKind.COMPUTE, 3),
        ("CPU", BufferKind.COMPUTE, 2),
    )
    driver = DeviceMemory("NVIDIA Test", 8 << 30, 2 << 30, 6 << 30)
    places = mapped([Resident("a", plan, measured, 50 * MIB)], [driver])
    found = {name: {one.part: one.size_bytes // MIB for one in place.measured} for name, place in places.items()}
    assert found == {"CUDA0": {"weights": 100, "kv_cache": 10}, RAM: {"weights": 40, "compute": 5}}
    # The driver's figure, less what is ours.
    assert places["CUDA0"].others_bytes == (2 << 30) - 110 * MIB
    # Mapped weights are no memory in use; the buffers are, as far as the process is that large.
    assert places[RAM].others_bytes == (4 << 30) - 5 * MIB


def test_a_device_without_a_model_is_shown_too(demo_model: Path) -> None:
    drivers = [DeviceMemory("NVIDIA Idle", 24 << 30, 1 << 30, 23 << 30)]
    places = mapped([Resident("a", plan_on(demo_model), None, 0)], drivers)
    assert list(places) == ["NVIDIA Idle", RAM]
    assert (places["NVIDIA Idle"].planned, places["NVIDIA Idle"].others_bytes) == ((), 1 << 30)


def test_two_equal_cards_are_two_places(demo_model: Path) -> None:
    devices = [Device(f"CUDA{number}", "NVIDIA Test", 8 << 30, 7 << 30) for number in range(2)]
    drivers = [DeviceMemory(f"NVIDIA Test @ {used}", 8 << 30, used << 30, (8 - used) << 30) for used in (1, 3)]
    places = mapped([Resident("a", plan_on(demo_model, devices=devices), MeasuredMemory(), 0)], drivers)
    assert list(places) == ["CUDA0", "CUDA1", RAM]


def test_a_bar_holds_everything_and_ends_with_what_is_kept_free(demo_model: Path) -> None:
    place = mapped([Resident(name, plan_on(demo_model), None, 0) for name in "ab"])[RAM]
    drawn = list(pieces(place, place.planned))
    assert [piece.part for piece in (drawn[0], drawn[-1])] == ["others", "reserve"]
    assert {piece.model for piece in drawn[1:-1]} == {"a", "b"}
    assert sum(piece.size_bytes for piece in drawn[1:-1]) == place.planned_bytes
    assert drawn[-1].x + drawn[-1].width == pytest.approx(1000, abs=0.1)
    assert drawn[-2].x + drawn[-2].width <= drawn[-1].x
    crowded = dataclasses.replace(place, total_bytes=place.planned_bytes)
    drawn = list(pieces(crowded, crowded.planned))
    assert max(piece.x + piece.width for piece in drawn) <= 1000.1
    assert crowded.left_bytes < 0


def test_rows_set_planned_beside_measured(demo_model: Path) -> None:
    measured = buffers(("CPU", BufferKind.MODEL, 92), ("CPU", BufferKind.OUTPUT, 1))
    place = mapped([Resident("a", plan_on(demo_model), measured, 0)])[RAM]
    found = {row.part: (row.planned is not None, row.measured is not None) for row in rows(place)}
    assert found["weights"] == (True, True)
    assert found["kv_cache"] == (True, False)
    assert found["output"] == (False, True)


# --- plots ------------------------------------------------------------------------------------------------------------


def test_a_plot_ends_at_the_right_edge_and_breaks_where_nothing_is_known() -> None:
    drawn = plot([1, 2, None, 4], slots=5)
    assert drawn.highest == 4
    assert drawn.line.count("M") == 2
    assert drawn.line.rpartition("M")[2].startswith(f"{WIDTH}.0 ")
    assert plot([0.0, 0.0], slots=2, least_scale=10).line == f"M0.0 {HEIGHT}.0L{WIDTH}.0 {HEIGHT}.0"
    assert plot([], slots=5).line == plot([None], slots=5).area == ""


def test_rates_are_differences_over_time_and_gaps_are_gaps() -> None:
    history = History()
    history.add(0.0, {"a": Totals(0, 0, 0, 0)})
    assert history.latest("a") is None
    history.add(2.0, {"a": Totals(10, 40, 1, 2), "b": Totals(0, 0, 0, 0)})
    assert history.latest("a") == Point(answer_rate=20.0, prompt_rate=5.0, busy=1, waiting=2)
    assert history.latest("b") is None
    # A counter that went back, as after a reload, is no negative speed.
    history.add(3.0, {"a": Totals(0, 0, 0, 0), "b": Totals(0, 7, 0, 0)})
    assert history.latest("a") == Point(0.0, 0.0, 0, 0)
    history.add(13.0, {"a": Totals(0, 0, 0, 0), "b": Totals(0, 7, 0, 0)})
    assert history.of("a")[2:11] == [None] * 9
    assert [point and point.answer_rate for point in sums([history.of("a"), history.of("b")])][:2] == [20.0, 7.0]
    history.add(14.0, {"b": Totals(0, 7, 0, 0)})
    assert history.of("a") == []
    history.add(14_000.0, {"b": Totals(0, 7, 0, 0)})
    assert len(history.of("b")) == KEPT_SECONDS


# --- why --------------------------------------------------------------------------------------------------------------


def event(kind: EventKind, message: str) -> Event:
    return Event(1, time.time(), kind, message, model="a")


FAILURE = Failure("it said /srv/x", "the device ran out of memory", 0.0)


@pytest.mark.parametrize(
    ("state", "last", "text"),
    [
        (State.STOPPED, None, "Not loaded; its first request loads it."),
        (State.STOPPED, event(EventKind.EVICTION, "Another model needed the room."), "Stopped: another model needed"),
        (State.STOPPED, event(EventKind.UNLOAD, "Nobody used it for 60 s."), "Unloaded: nobody used it"),
        (State.STOPPED, event(EventKind.LOAD, "Ready after 1 s."), "Not loaded"),
        (State.STARTING, None, "Loading."),
        (State.STARTING, event(EventKind.RESTART, "The engine crashed. Starting"), "The engine crashed."),
        (State.STARTING, event(EventKind.STEP_DOWN, "with less context."), "Loading again: with less context."),
        (State.READY, event(EventKind.LOAD, "Ready after 1 s."), "Serving."),
        (State.READY, event(EventKind.SLOW_DOWN, "Half as fast as before."), "Serving. Half as fast as before."),
        (State.READY, None, "Serving."),
        (State.STOPPING, None, "Stopping."),
        (State.FAILED, event(EventKind.FAILED, "It cannot be started: no room."), "It cannot be started: no room."),
        (State.FAILED, None, "It cannot be started: the device ran out of memory."),
    ],
)
def test_the_state_is_explained(demo_model: Path, tmp_path: Path, state: State, last: Event | None, text: str) -> None:
    model = ModelCatalog(settings_for(demo_model, tmp_path, {"a": {}})).resolve("a")
    status = ModelStatus(model, read_header(demo_model), state, 512, 1, None, failure=FAILURE)
    found = why(status, last)
    assert found.text.startswith(text)
    assert "/srv" not in found.text


def test_a_smaller_or_misplaced_plan_is_told(demo_model: Path, tmp_path: Path) -> None:
    model = ModelCatalog(settings_for(demo_model, tmp_path, {"a": {}})).resolve("a")
    plan = dataclasses.replace(plan_on(demo_model), steps=(Reason("batch", "256", "it ran out"),), degraded="secret")
    found = why(ModelStatus(model, read_header(demo_model), State.READY, 512, 1, None, plan=plan), None).text
    assert found.startswith("Serving by a smaller plan than at first: batch 256. Not all of it is where")
    assert "secret" not in found


@pytest.mark.parametrize(
    ("state", "failure", "text"),
    [
        (State.READY, None, "Answered by another server."),
        (State.FAILED, FAILURE, "The other server cannot be used: the device ran out of memory."),
        (State.STARTING, None, "Its server has not been asked yet"),
    ],
)
def test_a_model_elsewhere_is_explained(
    demo_model: Path, tmp_path: Path, state: State, failure: Failure | None, text: str
) -> None:
    model = ModelCatalog(settings_for(demo_model, tmp_path, {"a": {}})).resolve("a")
    status = ModelStatus(model, None, state, 512, 1, None, failure=failure, circuit=Circuit.CLOSED)
    assert why(status, None).text.startswith(text)


# --- snippets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("speaks_anthropic", [True, False])
def test_snippets_are_programs(has_keys: bool, speaks_anthropic: bool) -> None:
    found = snippets("http://box:8080", model="a'b", has_keys=has_keys, speaks_anthropic=speaks_anthropic)
    for name, text in found.items():
        if name.startswith("Python"):
            compile(text, name, "exec")
        assert ("LLAMA_KEY" in text) is has_keys
    assert ("Python, anthropic" in found) is speaks_anthropic


def test_a_base_url_cannot_break_out_of_a_snippet() -> None:
    url = "http://x'; rm -rf /; '"
    found: dict[str, Any] = snippets(url, model="a", has_keys=False, speaks_anthropic=True)
    assert "\ncurl" not in found["curl"]
    assert found["curl"].startswith("""curl 'http://x'"'"'; rm""")
    compile(found["Python, openai"], "snippet", "exec")
