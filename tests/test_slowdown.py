"""Slow by spilled memory, by pages from disk, by speed: flagged when it is, and not in an hour in which it is not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.events import EventKind, EventLog
from app.metrics import Metrics
from app.request_record import RequestRecord
from app.slowdown import Detector, Look, Slowdown, SlowdownWatch

MIB = 1 << 20


def answers(detector: Detector, *speeds: float, **fields: Any) -> None:
    for speed in speeds:
        detector.answered(speed, **{"tokens": 64, "context_tokens": 200, "busy": 1.0} | fields)


def taught(speed: float = 40) -> Detector:
    detector = Detector()
    detector.begin(1, "placement")
    answers(detector, *[speed] * 8)
    return detector


def looks(detector: Detector, *changes: tuple[float, int, int], start: float = 0) -> None:
    """(share of the device, shared MiB, pages read since the last look), every five seconds."""
    faults = 0
    for number, (share, shared, pages) in enumerate(changes):
        faults += pages
        detector.looked(Look(start + 5.0 * number, share, shared * MIB, faults))


# Speed


def test_half_the_own_speed_over_five_answers_is_slow_and_the_reason_has_the_figures() -> None:
    detector = taught(40)
    answers(detector, 40, 38, 15, 15)
    assert not detector.findings
    answers(detector, 15)
    assert "38% of its own usual speed" in detector.findings[Slowdown.DECODE_SPEED]
    assert "usually 39.9" in detector.findings[Slowdown.DECODE_SPEED]


def test_what_was_learned_before_the_first_look_counts() -> None:
    detector = Detector()
    answers(detector, *[40] * 8)
    detector.begin(1, "placement")
    answers(detector, *[15] * 5)
    assert detector.findings


def test_it_is_over_when_most_answers_are_fast_again_and_not_before() -> None:
    detector = taught(40)
    answers(detector, *[15] * 5)
    answers(detector, *[24] * 5)
    assert detector.findings
    answers(detector, *[35] * 3)
    assert not detector.findings


def test_a_slow_model_does_not_become_its_own_base() -> None:
    detector = taught(40)
    answers(detector, *[15] * 500)
    assert detector.findings


@pytest.mark.parametrize("fields", [{"busy": 4.0}, {"context_tokens": 20_000}])
def test_more_at_a_time_or_a_longer_context_is_another_base(fields: dict[str, Any]) -> None:
    detector = taught(40)
    answers(detector, *[10] * 30, **fields)
    assert not detector.findings
    answers(detector, *[4] * 5, **fields)
    assert detector.findings


def test_short_answers_say_nothing() -> None:
    detector = taught(40)
    answers(detector, *[1] * 50, tokens=7)
    assert not detector.findings


def test_another_placement_is_learned_anew_and_a_restart_is_not() -> None:
    detector = taught(40)
    detector.begin(2, "placement")
    answers(detector, *[10] * 5)
    assert detector.findings
    detector.begin(3, "smaller")
    assert not detector.findings
    answers(detector, *[10] * 30)
    assert not detector.findings


def test_an_engine_that_is_gone_is_not_slow() -> None:
    detector = taught(40)
    answers(detector, *[10] * 5)
    detector.rest()
    assert not detector.findings
    detector.begin(2, "placement")
    answers(detector, *[10] * 5)
    assert detector.findings


# Pages and spilled memory


def test_pages_read_from_disk_for_half_a_minute_are_a_slow_down_and_a_cold_start_is_not() -> None:
    detector = taught()
    looks(detector, *[(0.5, 0, 4000)] * 4, *[(0.5, 0, 0)] * 10)
    assert not detector.findings
    looks(detector, *[(0.5, 0, 1000)] * 8, start=1000)
    assert "200 pages/s" in detector.findings[Slowdown.PAGE_FAULTS]
    looks(detector, *[(0.5, 0, 0)] * 8, start=2000)
    assert not detector.findings


def test_a_full_device_with_growing_shared_memory_has_spilled() -> None:
    detector = taught()
    looks(detector, *[(0.99, 100, 0)] * 8)
    assert not detector.findings
    looks(detector, *[(0.99, 100 + 20 * number, 0) for number in range(8)], start=1000)
    assert "99% full" in detector.findings[Slowdown.VRAM_SPILL]
    looks(detector, *[(0.7, 0, 0)] * 8, start=2000)
    assert not detector.findings


def test_shared_memory_that_grows_on_a_device_with_room_is_none() -> None:
    detector = taught()
    looks(detector, *[(0.6, 100 * number, 0) for number in range(20)])
    assert not detector.findings


# An hour, its seconds taken from a clock of numbers


def a_clean_hour(dice: random.Random, detector: Detector) -> list[str]:
    """Requests of every size, one to four at a time, speeds that scatter by a quarter; looks every five seconds."""
    detector.begin(1, "placement")
    findings: list[str] = []
    faults = 20_000
    now = next_look = 0.0
    while now < 3600:
        busy, context = dice.randint(1, 4), dice.choice([200, 900, 3000, 9000])
        speed = 60 / busy**0.7 / (1 + context / 8000) * dice.uniform(0.75, 1.25)
        tokens = dice.choice([1, 20, 120, 400])
        now += tokens / speed + dice.expovariate(1 / 2)
        detector.answered(speed, tokens=tokens, context_tokens=context, busy=busy + dice.uniform(-0.4, 0.4))
        while next_look <= now:
            faults += dice.choice([0, 0, 0, 0, 3, 900])
            detector.looked(Look(next_look, dice.uniform(0.95, 0.999), 30 * MIB + dice.randint(0, MIB), faults))
            next_look += 5
        findings.extend(detector.findings.values())
    return findings


@pytest.mark.parametrize("seed", range(20))
def test_an_hour_of_ordinary_load_is_not_slow_and_half_speed_after_it_is(seed: int) -> None:
    dice, detector = random.Random(seed), Detector()
    assert a_clean_hour(dice, detector) == []
    for _ in range(5):
        speed = 60 / (1 + 900 / 8000) * dice.uniform(0.75, 1.25) * 0.4
        detector.answered(speed, tokens=100, context_tokens=900, busy=1)
    assert Slowdown.DECODE_SPEED in detector.findings


# What is done about it


def record(speed: float | None) -> RequestRecord:
    return RequestRecord(
        "r", "alice", "m", "chat", "ok", None, 1.0, 0.5, generated_tokens=64, generation_tokens_per_second=speed
    )


def test_a_slow_down_is_an_event_a_gauge_and_a_reason_and_so_is_its_end() -> None:
    metrics, events = Metrics(), EventLog()
    watch = SlowdownWatch(metrics, events)

    def gauge() -> float | None:
        labels = {"model": "m", "cause": "decode_speed"}
        return metrics.registry.get_sample_value("llama_gateway_model_slow", labels)

    watch.introduce("m")
    assert gauge() == 0
    watch.look("m", engine=1, placement="p", look=Look(0, 0, 0, 0))
    for speed in [None, *[40.0] * 8, *[10.0] * 9]:
        watch.observe(record(speed))
    watch.introduce("m")
    assert gauge() == 1
    assert list(watch.reasons("m")) == ["decode_speed"]
    for _ in range(5):
        watch.observe(record(40))
    assert (gauge(), dict(watch.reasons("m"))) == (0, {})
    told = events.latest(10)
    assert [(event.kind, event.model, event.cause) for event in told] == [
        (EventKind.SLOW_DOWN, "m", "decode_speed")
    ] * 2
    assert "is slowed down" in told[0].message
    assert "no longer" in told[1].message


def test_a_model_that_is_unloaded_or_removed_is_not_slow() -> None:
    metrics, events = Metrics(), EventLog()
    watch = SlowdownWatch(metrics, events)
    for speed in [*[40.0] * 8, *[10.0] * 5]:
        watch.observe(record(speed))
    assert watch.reasons("m")
    watch.rest("m")
    assert not watch.reasons("m")
    watch.forget_models_but(set())
    assert len(events.latest(10)) == 2
