"""What an engine's log says of a slot that it lets go of."""

from __future__ import annotations

import asyncio

from app.engine.releases import Releases

LINE = "0.02.713.455 I slot      release: id  {slot} | task 12 | stop processing: n_tokens = {tokens}, truncated = 0"


async def test_who_waits_for_a_slot_hears_of_that_slot() -> None:
    releases = Releases()
    releases.feed([LINE.format(slot=1, tokens=7)])
    with releases.awaited(1) as first, releases.awaited(0) as second:
        assert not first.done()
        releases.feed(["slot launch_slot_: id  1 | task 12 | processing task", LINE.format(slot=1, tokens=36)])
        assert (await first, second.done()) == (36, False)
        releases.feed([LINE.format(slot=1, tokens=99), LINE.format(slot=0, tokens=5)])
        assert (await first, await second) == (36, 5)


async def test_who_no_longer_waits_disturbs_nobody() -> None:
    releases = Releases()
    with releases.awaited(0) as left:
        left.cancel()
        releases.feed([LINE.format(slot=0, tokens=1)])
    with releases.awaited(0) as heard:
        releases.feed([LINE.format(slot=0, tokens=2)])
        assert await asyncio.wait_for(heard, 1) == 2
