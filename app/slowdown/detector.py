"""Pure: one model's answers and footprints → what slows it down. No clock, no effects."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median

_MIB = 1 << 20


class Slowdown(StrEnum):
    """What slows a model down."""

    VRAM_SPILL = "vram_spill"
    PAGE_FAULTS = "page_faults"
    DECODE_SPEED = "decode_speed"


@dataclass(frozen=True, slots=True)
class Look:
    """An engine's footprint at ``at`` (seconds, monotonic): counters since its start, and its fullest device."""

    at: float
    device_share: float
    shared_bytes: int
    major_faults: int


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When it counts as slow, and when no longer: each pair leaves a gap, so that nothing flickers.

    ``learned_answers`` make a base; the last ``judged_answers`` are held against it. ``looks`` in a row must agree:
    a cold model reads its pages from disk once, and that is no slow-down.
    """

    learned_answers: int = 8
    judged_answers: int = 5
    least_tokens: int = 8
    slow_share: float = 0.5
    fast_share: float = 0.7
    looks: int = 6
    faults_per_second: float = 100.0
    full_share: float = 0.97
    spilled_bytes: int = 64 * _MIB


class Detector:
    """What is known of one model's engine; ``findings`` holds a sentence with the figures for each slow-down.

    Answers are compared with their like: as many at a time, about as long a context. The base follows what is not slow
    by a twentieth per answer.
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._limits = thresholds or Thresholds()
        self._engine: object = None
        self._placement: object = None
        self._learning: dict[tuple[int, int], list[float]] = {}
        self._bases: dict[tuple[int, int], float] = {}
        self._ratios: deque[float] = deque(maxlen=self._limits.judged_answers)
        self._looks: deque[Look] = deque(maxlen=self._limits.looks + 1)
        self._findings: dict[Slowdown, str] = {}

    @property
    def findings(self) -> Mapping[Slowdown, str]:
        """What slows the model down now."""
        return self._findings

    def begin(self, engine: object, placement: object) -> None:
        """Another engine serves the model; by another placement it has another speed, to be learned anew."""
        if engine == self._engine:
            return
        self._engine = engine
        self._looks.clear()
        self._findings.pop(Slowdown.PAGE_FAULTS, None)
        self._findings.pop(Slowdown.VRAM_SPILL, None)
        # What was learned before the first look was learned of this engine.
        is_other = self._placement is not None and placement != self._placement
        self._placement = placement
        if is_other:
            self._learning.clear()
            self._bases.clear()
            self._ratios.clear()
            self._findings.pop(Slowdown.DECODE_SPEED, None)

    def rest(self) -> None:
        """No engine: what slowed the last one down is over; what is known of its speed stays."""
        self._engine = None
        self._looks.clear()
        self._ratios.clear()
        self._findings.clear()

    def answered(self, tokens_per_second: float, *, tokens: int, context_tokens: int, busy: float) -> None:
        """One answer of ``tokens``, while on average ``busy`` slots worked."""
        if tokens < self._limits.least_tokens or tokens_per_second <= 0:
            return
        like = (max(1, round(busy)), max(0, (context_tokens // 1024).bit_length()))
        base = self._bases.get(like)
        if base is None:
            self._learn(like, tokens_per_second)
            return
        ratio = tokens_per_second / base
        if ratio >= self._limits.slow_share:
            self._bases[like] = base + (tokens_per_second - base) / 20
        self._ratios.append(ratio)
        self._judge_speed(tokens_per_second, base)

    def looked(self, look: Look) -> None:
        """The footprint of a ready engine."""
        self._looks.append(look)
        if len(self._looks) > self._limits.looks:
            self._judge_faults()
            self._judge_spill()

    def _learn(self, like: tuple[int, int], tokens_per_second: float) -> None:
        seen = self._learning.setdefault(like, [])
        seen.append(tokens_per_second)
        if len(seen) >= self._limits.learned_answers:
            self._bases[like] = median(self._learning.pop(like))

    def _judge_speed(self, tokens_per_second: float, base: float) -> None:
        limits = self._limits
        if len(self._ratios) < limits.judged_answers:
            return
        ratio = median(self._ratios)
        if ratio < limits.slow_share:
            self._findings[Slowdown.DECODE_SPEED] = (
                f"its last {limits.judged_answers} answers came at {ratio:.0%} of its own usual speed "
                f"(now {tokens_per_second:.1f} tokens/s, usually {base:.1f}): heat, or another program on the device"
            )
        elif ratio >= limits.fast_share:
            self._findings.pop(Slowdown.DECODE_SPEED, None)

    def _judge_faults(self) -> None:
        rates = self._fault_rates()
        if min(rates) > self._limits.faults_per_second:
            seconds = self._looks[-1].at - self._looks[0].at
            self._findings[Slowdown.PAGE_FAULTS] = (
                f"it reads {sum(rates) / len(rates):.0f} pages/s of its weights from disk for {seconds:.0f} s: "
                "the RAM is too small for what is loaded"
            )
        elif max(rates[-2:]) < self._limits.faults_per_second / 2:
            self._findings.pop(Slowdown.PAGE_FAULTS, None)

    def _fault_rates(self) -> list[float]:
        return [
            (later.major_faults - earlier.major_faults) / max(0.001, later.at - earlier.at)
            for earlier, later in pairwise(self._looks)
        ]

    def _judge_spill(self) -> None:
        first, last = self._looks[0], self._looks[-1]
        is_full = all(look.device_share >= self._limits.full_share for look in self._looks)
        grown = last.shared_bytes - first.shared_bytes
        if is_full and grown >= self._limits.spilled_bytes:
            self._findings[Slowdown.VRAM_SPILL] = (
                f"its device is {last.device_share:.0%} full and the driver has put {last.shared_bytes // _MIB} MiB "
                "into RAM instead: raise memory.vram_reserve or lower the context"
            )
        elif not is_full and grown <= 0:
            self._findings.pop(Slowdown.VRAM_SPILL, None)
