"""Budgets that several gateways share, in Redis or Valkey: each step is one script there, so nothing comes between."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app.errors import GatewayError
from app.quota.clock import SteadyClock
from app.quota.ledger import Ledger, Row, Standing, Ticket
from app.quota.limits import Amounts, Limits, Window
from app.quota.memory_store import MemoryStore
from app.quota.refusals import QuotaUnavailable, RateLimited, too_many_open

_log = logging.getLogger(__name__)

# A request never waits longer for the store than this.
_ANSWER_SECONDS = 0.8
_PROBE_SECONDS = 1.0
# A gateway that dies leaves its requests open for so long; a living one renews them three times as often.
_LEASE_SECONDS = 60
_FORGET_SECONDS = 2 * 86_400
_MOST_UNSETTLED = 100_000

# KEYS: use by "window:bucket", open requests by the time at which they expire.
# ARGV: now, id, limit of open requests (-1: none), lease, forget, then window, oldest bucket, bucket, limit, amount …
_RESERVE = """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[1] - ARGV[5])
local used, refused = {}, 0
for i = 6, #ARGV, 5 do used[ARGV[i]] = 0 end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local window, bucket = string.match(all[i], '^(.*):(%d+)$')
  for j = 6, #ARGV, 5 do
    if ARGV[j] == window then
      if tonumber(bucket) <= tonumber(ARGV[j + 1]) then
        redis.call('HDEL', KEYS[1], all[i])
      else
        used[window] = used[window] + all[i + 1]
      end
    end
  end
end
local limit = tonumber(ARGV[3])
if limit >= 0 and redis.call('ZCOUNT', KEYS[2], '(' .. ARGV[1], '+inf') >= limit then refused = 1 end
for i = 6, #ARGV, 5 do
  local most, wanted = tonumber(ARGV[i + 3]), math.max(1, tonumber(ARGV[i + 4]))
  if refused == 0 and most >= 0 and used[ARGV[i]] + wanted > most then refused = 2 end
end
if refused == 0 then
  for i = 6, #ARGV, 5 do
    if tonumber(ARGV[i + 4]) > 0 then redis.call('HINCRBY', KEYS[1], ARGV[i] .. ':' .. ARGV[i + 2], ARGV[i + 4]) end
  end
  redis.call('ZADD', KEYS[2], ARGV[1] + ARGV[4], ARGV[2])
  redis.call('EXPIRE', KEYS[1], ARGV[5])
  redis.call('EXPIRE', KEYS[2], ARGV[5])
end
return {refused, redis.call('HGETALL', KEYS[1])}
"""
# ARGV: id, then "window:bucket", change …; a request is settled once, however often we ask.
_SETTLE = """
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end
for i = 2, #ARGV, 2 do
  local now = redis.call('HGET', KEYS[1], ARGV[i])
  if now or tonumber(ARGV[i + 1]) > 0 then
    redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f', math.max(0, (now or 0) + ARGV[i + 1])))
  end
end
return 1
"""


class _UnreachableError(Exception):
    """The store did not answer in time, or not in a way that helps."""


class RedisStore:
    """Shared budgets. What we grant is counted here as well: with ``fail_open`` the cap while nobody answers."""

    def __init__(self, url: str, *, fail_open: bool = False, prefix: str = "llama-gateway") -> None:
        retry = Retry(NoBackoff(), 0)
        self._client: Redis = Redis.from_url(
            url, socket_timeout=_ANSWER_SECONDS, socket_connect_timeout=_ANSWER_SECONDS, retry=retry
        )
        self._reserve_script = self._client.register_script(_RESERVE)
        self._settle_script = self._client.register_script(_SETTLE)
        self._prefix = prefix
        self._fail_open = fail_open
        self._clock: SteadyClock | None = None
        self._local = MemoryStore()
        self._mirrored: dict[str, Ticket] = {}
        self._granted: dict[str, Ticket] = {}
        self._unsettled: deque[tuple[Ticket, Amounts]] = deque(maxlen=_MOST_UNSETTLED)
        self._work = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self.is_reachable = True

    @classmethod
    def at(cls, address: str, *, base: Path, fail_open: bool) -> RedisStore:
        """``redis://…``, ``rediss://…`` or ``unix:SOCKET``."""
        scheme, _, rest = address.partition(":")
        if scheme == "unix" and not rest.startswith("//"):
            address = f"unix://{base / rest}"
        return cls(address, fail_open=fail_open)

    async def open(self) -> None:
        """Begin; a store that does not answer is waited for in the background."""
        with suppress(_UnreachableError):
            await self._steady_clock()
        self._worker = asyncio.create_task(self._work_forever(), name="quota settler")

    async def close(self) -> None:
        """Settle what is left if the store answers."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        with suppress(_UnreachableError):
            await self._settle_all()
        await self._client.aclose()

    async def reserve(self, key: str, limits: Limits, asked: Amounts) -> Ticket:
        """Take it or raise RateLimited or BudgetSpent; without an answer decide alone or raise QuotaUnavailable."""
        if self.is_reachable:
            with suppress(_UnreachableError):
                return await self._reserve(key, limits, asked)
        if limits.is_any and not self._fail_open:
            raise QuotaUnavailable("The store of the budgets does not answer; try again.", retry_after_seconds=5)
        ticket = await self._local.reserve(key, limits, asked)
        self._mirrored[ticket.id] = ticket
        return ticket

    def settle(self, ticket: Ticket, actual: Amounts) -> None:
        """Replace what was reserved by what was used."""
        if (mirrored := self._mirrored.pop(ticket.id, None)) is not None:
            self._local.settle(mirrored, actual)
        if self._granted.pop(ticket.id, None) is not None:
            self._settle_later(ticket, actual)

    async def standing(self, key: str, limits: Limits) -> tuple[Standing, ...]:
        """How the key stands in every window, as far as is known."""
        with suppress(_UnreachableError):
            clock = await self._steady_clock()
            rows = await self._ask(self._client.hgetall(self._keys(key)[0]))
            flat = [item for pair in rows.items() for item in pair]
            return _ledger_of(key, flat).standing(key, limits, now=clock.now())
        return await self._local.standing(key, limits)

    async def _reserve(self, key: str, limits: Limits, asked: Amounts) -> Ticket:
        clock = await self._steady_clock()
        now, identity = clock.now(), secrets.token_hex(12)
        concurrent = -1 if limits.concurrent is None else limits.concurrent
        arguments: list[Any] = [f"{now:.3f}", identity, concurrent, _LEASE_SECONDS, _FORGET_SECONDS]
        for window in Window:
            limit, bucket = limits.of(window), window.bucket(now)
            oldest = bucket - window.buckets
            arguments += [window.label, oldest, bucket, -1 if limit is None else limit, asked.of(window)]
        ticket = Ticket(identity, key, asked, now)
        try:
            refused, content = await self._ask(self._reserve_script(keys=self._keys(key), args=arguments))
        except (_UnreachableError, asyncio.CancelledError):
            # It may have been taken all the same; given back it is when the store can be asked again.
            self._settle_later(ticket, Amounts())
            raise
        ledger = _ledger_of(key, content)
        if refused:
            raise _refusal(key, limits, asked, ledger, is_open=refused == 1, now=now)
        self._mirrored[identity] = self._local.ledger.take(key, limits, asked, now=self._local.clock.now())
        standing = ledger.standing(key, limits, now=now) if limits.is_any else ()
        self._granted[identity] = ticket = Ticket(identity, key, asked, now, standing)
        return ticket

    def _settle_later(self, ticket: Ticket, actual: Amounts) -> None:
        self._unsettled.append((ticket, actual))
        self._work.set()

    async def _work_forever(self) -> None:
        """Settle, renew, and ask again after a silence."""
        renew_at = asyncio.get_running_loop().time() + _LEASE_SECONDS / 3
        while True:
            # Not wait_for: up to Python 3.11 it swallows a cancellation that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_SECONDS):
                    await self._work.wait()
            self._work.clear()
            try:
                if not self.is_reachable:
                    await self._ask(self._client.ping())
                await self._settle_all()
                if asyncio.get_running_loop().time() >= renew_at:
                    await self._renew()
                    renew_at += _LEASE_SECONDS / 3
            except _UnreachableError:
                await asyncio.sleep(_PROBE_SECONDS)

    async def _settle_all(self) -> None:
        while self._unsettled:
            ticket, actual = self._unsettled[0]
            arguments: list[Any] = [ticket.id]
            for window in Window:
                change = actual.of(window) - ticket.asked.of(window)
                arguments += [f"{window.label}:{window.bucket(ticket.taken_at)}", change] if change else []
            await self._ask(self._settle_script(keys=self._keys(ticket.key), args=arguments))
            self._unsettled.popleft()

    async def _renew(self) -> None:
        clock = await self._steady_clock()
        for ticket in list(self._granted.values()):
            expires_at = {ticket.id: clock.now() + _LEASE_SECONDS}
            await self._ask(self._client.zadd(self._keys(ticket.key)[1], expires_at, xx=True))

    async def _steady_clock(self) -> SteadyClock:
        """A clock set once by the store's, so that all gateways mean the same buckets, and moved by our counter."""
        if self._clock is None:
            seconds, microseconds = await self._ask(self._client.time())
            self._clock = SteadyClock(wall=lambda: seconds + microseconds / 1e6)
        return self._clock

    async def _ask(self, question: Any) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await question
        except (RedisError, OSError, TimeoutError) as error:
            if self.is_reachable:
                then = "keys are limited by this gateway alone" if self._fail_open else "keys with limits are refused"
                _log.error("the store of the budgets does not answer (%s): %s", type(error).__name__, then)
            self.is_reachable = False
            raise _UnreachableError from error
        if not self.is_reachable:
            _log.warning("the store of the budgets answers again")
        self.is_reachable = True
        return answer

    def _keys(self, key: str) -> tuple[str, str]:
        # In braces, so that a cluster keeps both in one place.
        return f"{self._prefix}:{{{key}}}:used", f"{self._prefix}:{{{key}}}:open"


def _ledger_of(key: str, content: Sequence[bytes]) -> Ledger:
    """The store's flat list of fields and values, in our own form."""
    rows: dict[Row, int] = {}
    for name, amount in zip(content[::2], content[1::2], strict=True):
        label, _, bucket = name.decode().rpartition(":")
        rows[key, label, int(bucket)] = int(amount)
    ledger = Ledger()
    ledger.load(rows)
    return ledger


def _refusal(key: str, limits: Limits, asked: Amounts, ledger: Ledger, *, is_open: bool, now: float) -> GatewayError:
    if is_open:
        return too_many_open(key, limits.concurrent or 0)
    try:
        ledger.reserve(key, limits, asked, now=now)
    except GatewayError as refusal:
        return refusal
    return RateLimited(f"The key {key!r} has used up its limits; try again.", retry_after_seconds=1)
