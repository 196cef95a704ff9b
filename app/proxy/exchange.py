"""One exchange with one client: the work raced against the client's leaving."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive, Scope, Send

from app.errors import GatewayError
from app.proxy.exchanges import Exchanges
from app.proxy.outlet import Headers, Outlet


@dataclass(slots=True)
class Patience:
    """How long silence may last, in seconds.

    A stream gets a sign of life every ``pulse``: clients and proxies on the way give up after 30 s at the earliest.
    A client may leave what it was sent unread for ``stall``.
    """

    pulse_seconds: float = 15.0
    stall_seconds: float = 60.0


class Work(Protocol):
    """What an exchange does for its client."""

    async def run(self, outlet: Outlet) -> None:
        """Answer; raises GatewayError, and CancelledError when the client has left."""

    def silence_headers(self) -> Headers | None:
        """The head with which a stream that has nothing to say yet may be begun; None when it may not."""

    def failure(self, error: GatewayError) -> bytes:
        """The error in the words of a stream that has begun."""

    def account(self, outcome: str, error: GatewayError | None) -> None:
        """It has ended: ``ok``, ``rejected``, ``failed`` or ``client_gone``."""


class ExchangeResponse:
    """An ASGI response that does its work when called, so that whatever it takes is given back by its own ``with``."""

    def __init__(self, work: Work, exchanges: Exchanges, patience: Patience) -> None:
        self.work = work
        self._exchanges = exchanges
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._cut_by: GatewayError | None = None

    def cut(self, error: GatewayError) -> None:
        """Break the exchange off; the client is told ``error``."""
        if self._task is not None and self._cut_by is None:
            self._cut_by = error
            self._task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Race the exchange against the client's leaving; who leaves takes the exchange down with it."""
        with self._exchanges.tracked(self):
            await self._race(receive, Outlet(scope, send))

    async def _race(self, receive: Receive, outlet: Outlet) -> None:
        exchange = self._task = asyncio.create_task(self._run(outlet))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            while not await _any_done(exchange, gone, seconds=self._patience.pulse_seconds):
                if outlet.stalled_seconds() > self._patience.stall_seconds:
                    # A client that does not read is as good as gone, but for the memory and the slot it holds.
                    break
                await self._keep_alive(outlet)
        finally:
            # The loop hands out CancelledError where each of them waits; both are awaited, so nothing outlives us.
            for task in (exchange, gone):
                task.cancel()
            await asyncio.gather(exchange, gone, return_exceptions=True)
        if not exchange.cancelled():
            exchange.result()

    async def _keep_alive(self, outlet: Outlet) -> None:
        """A sign of life while a stream has nothing to say: in the queue, while a model loads, in prefill."""
        if (headers := self.work.silence_headers()) is not None:
            await outlet.keep_alive(headers)

    async def _run(self, outlet: Outlet) -> None:
        outcome, failed = "client_gone", None
        try:
            await self._uncut(outlet)
            outcome = "ok"
        except GatewayError as error:
            outcome, failed = ("rejected" if error.status < 500 else "failed"), error
            if not outlet.begun:
                raise
            # The status is sent: say it in the stream, then let the server break the connection off.
            await outlet.write(self.work.failure(error))
        finally:
            self.work.account(outcome, failed)

    async def _uncut(self, outlet: Outlet) -> None:
        try:
            await self.work.run(outlet)
        except asyncio.CancelledError:
            if self._cut_by is None:
                raise
            raise self._cut_by from None


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has closed its side; half a close counts, since llama-server reads it so too."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _any_done(*tasks: asyncio.Task[None], seconds: float) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
