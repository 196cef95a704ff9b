"""A program that uses up a budget as fast as it can and says what it does, until it is killed.

`python tests/quota_victim.py FILE LIMIT`: one line of output before each piece of work, written straight to the pipe.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from app.errors import GatewayError
from app.quota import Limits, Quota, SQLiteStore


def say(line: str) -> None:
    os.write(1, (line + "\n").encode())


async def work(quota: Quota, limits: Limits, choose: random.Random) -> None:
    while True:
        tokens = choose.randint(1, 50)
        try:
            async with quota.reserve("k", limits, tokens=tokens) as reservation:
                # The engine works: from here on the tokens are really spent, whatever becomes of us.
                actual = choose.randint(0, tokens)
                say(f"spent {actual}")
                reservation.charge(tokens=actual)
                await asyncio.sleep(choose.random() * 0.002)
        except GatewayError:
            say("refused 0")
            await asyncio.sleep(0.001)


async def main(path: Path, limit: int) -> None:
    quota, limits = Quota(SQLiteStore(path)), Limits(tokens_per_day=limit)
    await quota.open()
    choose = random.Random()
    say("ready 0")
    await asyncio.gather(*(work(quota, limits, choose) for _ in range(4)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
