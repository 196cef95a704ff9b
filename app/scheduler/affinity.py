"""Which slot a conversation goes back to: the one whose cache it can use best, at the least loss to the others."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import orjson

# What a slot holds counts half as much with every such time in which nobody came back for it.
_HALF_LIFE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Link:
    """The conversation up to and including one message: its digest, and its size in bytes."""

    digest: bytes
    size_bytes: int


def prefix_chain(messages: Sequence[Mapping[str, Any]], *, head: bytes = b"") -> tuple[Link, ...]:
    """A link per message; ``head`` is what is rendered before them, such as the tools."""
    digest, size, chain = hashlib.blake2b(head, digest_size=16), len(head), []
    for message in messages:
        content = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
        digest.update(content)
        size += len(content)
        chain.append(Link(digest.digest(), size))
    return tuple(chain)


@dataclass(slots=True)
class _Slot:
    chain: tuple[Link, ...] = ()
    end: bytes = b""
    used_at: float = 0.0
    is_busy: bool = False

    def take(self, chain: Sequence[Link], now: float) -> None:
        """A request with this conversation goes there."""
        self.chain, self.used_at, self.is_busy = tuple(chain), now, True
        self.end = self.chain[-1].digest if self.chain else b""

    def common_bytes(self, chain: Sequence[Link]) -> int:
        common = 0
        for mine, other in zip(self.chain, chain, strict=False):
            if mine.digest != other.digest:
                break
            common = mine.size_bytes
        return common

    def value(self, chain: Sequence[Link], now: float) -> float:
        """What is gained by reusing the slot less what is lost with the rest of its content, in bytes of prompt."""
        if not self.chain:
            return 0.0
        held, common = self.chain[-1].size_bytes, self.common_bytes(chain)
        worth = math.exp2((self.used_at - now) / _HALF_LIFE_SECONDS)
        return common - (held - common) * worth


class SlotAffinity:
    """The contents of one engine's slots, as far as we sent them there; a new engine needs a new one."""

    def __init__(self, slots: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]

    def choose(self, chain: Sequence[Link], *, free: Collection[int], now: float) -> int:
        """The slot among ``free`` to send it to; of equals the one not used for longest."""
        slots, end = self._slots, chain[-1].digest if chain else b""
        # All of the conversation and nothing else: no slot can be worth more.
        if same := [number for number in free if slots[number].end == end]:
            return min(same, key=lambda number: slots[number].used_at)
        return max(free, key=lambda number: (slots[number].value(chain, now), -slots[number].used_at))

    @contextmanager
    def slot(self, chain: Sequence[Link], *, now: float) -> Iterator[int | None]:
        """A free slot until the block ends; None when all are taken, then the engine chooses."""
        free = [number for number, slot in enumerate(self._slots) if not slot.is_busy]
        if not free:
            yield None
            return
        number = self.choose(chain, free=free, now=now)
        slot = self._slots[number]
        slot.take(chain, now)
        try:
            yield number
        finally:
            slot.is_busy = False


class Affinities:
    """The slots of every engine; what is known of them is gone with the engine."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[object, SlotAffinity] = WeakKeyDictionary()

    @contextmanager
    def slot(
        self, engine: object, messages: Sequence[Mapping[str, Any]], *, slots: int, head: bytes = b""
    ) -> Iterator[int | None]:
        """The slot of this engine to send a conversation to; None where there is no choice."""
        if slots < 2:
            yield None
            return
        affinity = self._of.get(engine)
        if affinity is None:
            affinity = self._of[engine] = SlotAffinity(slots)
        with affinity.slot(prefix_chain(messages, head=head), now=time.monotonic()) as number:
            yield number
