"""A server elsewhere that speaks OpenAI's API: its connection, its limits, and whether it is worth asking."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from yarl import URL

from app.backends.base import CHAT_ROUTE
from app.backends.breaker import Breaker, BreakerRules, Circuit
from app.backends.departure import Departure
from app.backends.remote_counting import new_counter
from app.backends.remote_faults import is_its_fault, remote_fault
from app.backends.remote_limits import Limits, RouteMissing, choose_limits
from app.config import RemoteServer
from app.engine.connection import Sink
from app.errors import (
    EngineGone,
    GatewayError,
    ModelFailed,
    UnsupportedEndpoint,
    UpstreamFailed,
    UpstreamTimeout,
)
from app.protocol import Abilities, EventTooLong
from app.protocol.sse import SSESplitter, event_data
from app.tokens import PromptEstimate, TokenCounter
from app.trace_context import outgoing_headers

# What llama-server alone understands; other servers refuse unknown names.
_LLAMA_ONLY = ("return_progress", "id_slot", "verbose", "thinking_budget_tokens")
_TRIAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RemoteRules:
    """Times in seconds: to connect, to answer a question, between two bytes of an answer, between two looks at it."""

    connect: float = 10.0
    question: float = 10.0
    silence: float = 300.0
    look: float = 15.0
    breaker: BreakerRules = field(default_factory=BreakerRules)


class _RemoteReply:
    def __init__(self, response: aiohttp.ClientResponse, model_id: str) -> None:
        self._response = response
        self._model_id = model_id
        self._splitter = SSESplitter()
        # By the server's own account, at the end.
        self.prompt_tokens: int | None = None

    async def read(self) -> bytes:
        """Whole events, in which the model has the name by which our client asked for it; empty at the end."""
        while chunk := await self._response.content.readany():
            try:
                events = self._splitter.feed(chunk)
            except EventTooLong as error:
                raise UpstreamFailed(f"The remote server's answer cannot be read: {error}.", streamed=True) from error
            if events:
                return b"".join(map(self._ours, events))
        return b""

    def hand_to(self, sink: Sink) -> None:
        """Never: every event is rewritten."""

    def _ours(self, event: bytes) -> bytes:
        """The event as llama-server would write it: compact, which is what is looked for further on."""
        try:
            chunk = orjson.loads(event_data(event))
        except orjson.JSONDecodeError:
            return event  # a comment, the end, or nonsense: that is judged where all answers are
        if not isinstance(chunk, dict):
            return event
        if isinstance(usage := chunk.get("usage"), dict) and isinstance(tokens := usage.get("prompt_tokens"), int):
            self.prompt_tokens = tokens
        if "model" in chunk:
            chunk["model"] = self._model_id
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


class RemoteBackend:
    """Answers by way of another server, ``slots`` requests at a time.

    ``look`` asks for its health and never wakes a model there; ``prepare`` learns its limits. The first costs it
    nothing, the second may load the model.
    """

    def __init__(
        self,
        server: RemoteServer,
        *,
        model_id: str,
        slots: int,
        context_tokens: int | None,
        key: str | None,
        on_change: Callable[[], None],
        rules: RemoteRules | None = None,
    ) -> None:
        self.slots = slots
        self.pool_tokens: int | None = None  # it looks after that itself
        # It has other clients than us.
        self.chooses_slots = True
        # What it cannot take in it says itself.
        self.abilities = Abilities(images=True, audio=True)
        self.limits: Limits | None = None
        self.problem: str | None = None
        self.rules = rules or RemoteRules()
        self._server = server
        self._model_id = model_id
        self._context_tokens = context_tokens
        self._key = key
        self._on_change = on_change
        self._breaker = Breaker(time.monotonic, self.rules.breaker)
        self._counter: TokenCounter | None = None
        self._estimate: PromptEstimate | None = None
        self._preparing = asyncio.Lock()
        self._session = self._connect()
        self._base = URL(server.url)
        self._root = URL(server.url.removesuffix("/v1"))

    @property
    def circuit(self) -> Circuit:
        """Whether requests pass."""
        return self._breaker.circuit

    @property
    def retry_seconds(self) -> float:
        """When it is worth asking again."""
        return self._breaker.retry_seconds

    @property
    def counter(self) -> TokenCounter:
        """Counts prompts against the context that it gives a request; only after ``prepare``."""
        if self._counter is None:
            raise RuntimeError("the remote server's limits are not known yet")
        return self._counter

    async def look(self) -> None:
        """Ask for its models: whether it answers, and with what context; ``problem`` says when it does not."""
        try:
            self.limits = await self._learn_limits()
        except GatewayError as error:
            # What the server is at fault for has been noted already.
            if not is_its_fault(error):
                self.problem = str(error)
        else:
            self._breaker.answered()
            if self.circuit is Circuit.CLOSED:
                self.problem = None

    async def prepare(self) -> None:
        """Learn how it counts, unless that is known; raises GatewayError."""
        async with self._preparing:
            if self._counter is None:
                self.limits = self.limits or await self._learn_limits()
                self._counter, self._estimate = await new_counter(self, self.limits, self._server.tokenizer)

    def forgive(self) -> None:
        """Try it at once, whatever its past failures."""
        self._breaker.succeeded()

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._session.close()

    @asynccontextmanager
    async def open(
        self, body: bytes, route: str = CHAT_ROUTE, *, departure: Departure | None = None
    ) -> AsyncIterator[_RemoteReply]:
        """Start an answer; leaving the context closes the connection, by which the server notices.

        Raises ModelFailed while it is not worth asking, else what it says, or UpstreamFailed when it breaks off.
        """
        if not self._breaker.enter():
            raise ModelFailed(
                f"The remote server of {self._model_id!r} is being tried after it failed; try again.",
                retry_after_seconds=max(_TRIAL_SECONDS, self.retry_seconds),
            )
        with self._watched(is_request=True):
            response = await self._session.post(
                self._url(route.removeprefix("/v1/")),
                data=self._its_words(body),
                headers=outgoing_headers(),
                allow_redirects=False,
            )
            try:
                if response.status != 200:
                    raise remote_fault(response.status, response.headers, await response.read())
                reply = _RemoteReply(response, self._model_id)
                yield reply
            finally:
                response.close()
        if self._estimate is not None and reply.prompt_tokens is not None and route == CHAT_ROUTE:
            await self._estimate.learn(body, reply.prompt_tokens)

    async def query(self, route: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question that is no stream; raises UnsupportedEndpoint where the server has no such route."""
        try:
            answer = await self.ask(
                route.removeprefix("/v1").removeprefix("/"), document, at_root=not route.startswith("/v1/")
            )
        except RouteMissing:
            raise UnsupportedEndpoint(
                f"The server of {self._model_id!r} does not answer {route}; choose another model.", param="model"
            ) from None
        if not isinstance(answer, dict):
            raise UpstreamFailed("The remote server answered with something that is not an object.")
        return answer

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, *, at_root: bool = False) -> Any:
        """The JSON answer to a small question; raises RouteMissing for a route that it lacks."""
        url = self._url(path, at_root=at_root)
        timeout = aiohttp.ClientTimeout(total=self.rules.question if body is None else None)
        data = None if body is None else orjson.dumps({"model": self._its_name(), **body})
        method = "GET" if body is None else "POST"
        # Where it sends us elsewhere our key must not follow.
        with self._watched():
            async with self._session.request(
                method, url, data=data, timeout=timeout, allow_redirects=False
            ) as response:
                content = await response.read()
            if response.status in (404, 405, 501):
                raise RouteMissing(path)
            if response.status != 200:
                raise remote_fault(response.status, response.headers, content)
            try:
                return orjson.loads(content)
            except orjson.JSONDecodeError as error:
                raise UpstreamFailed(f"The remote server answered {path} with something that is not JSON.") from error

    async def _learn_limits(self) -> Limits:
        return await choose_limits(
            self, public_name=self._model_id, stated_name=self._server.model, stated_context=self._context_tokens
        )

    @contextmanager
    def _watched(self, *, is_request: bool = False) -> Iterator[None]:
        """What happens within the block tells whether the server works; connection errors become GatewayErrors."""
        try:
            yield
        except aiohttp.SocketTimeoutError as error:
            self._failed("it sent nothing for too long")
            raise UpstreamTimeout("The remote server sent nothing for too long.") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._failed(_reason(error), was_reached=not isinstance(error, _UNREACHED))
            raise EngineGone("The connection to the remote server broke; send the request again.") from error
        except GatewayError as error:
            if is_its_fault(error):
                self._failed(error.message)
            elif is_request:
                self._breaker.succeeded()
            raise
        except BaseException:
            if is_request:
                self._breaker.left()
            raise
        else:
            if is_request:
                self._breaker.succeeded()
        finally:
            self._on_change()

    def _failed(self, problem: str, *, was_reached: bool = True) -> None:
        self._breaker.failed(was_reached=was_reached)
        if self.circuit is Circuit.OPEN:
            # It may come back as another one.
            self._counter = None
        self.problem = problem

    def _its_words(self, body: bytes) -> bytes:
        """A request in the words of the other server: the model's name there, and nothing that it may not know."""
        document = orjson.loads(body)
        for name in _LLAMA_ONLY:
            document.pop(name, None)
        return orjson.dumps(document | {"model": self._its_name()})

    def _its_name(self) -> str:
        if self.limits is not None:
            return self.limits.model
        return self._server.model or self._model_id

    def _url(self, path: str, *, at_root: bool = False) -> URL:
        return (self._root if at_root else self._base) / path

    def _connect(self) -> aiohttp.ClientSession:
        rules = self.rules
        key = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=rules.connect, sock_read=rules.silence),
            headers={"content-type": "application/json", "accept-encoding": "identity"} | key,
            read_bufsize=1 << 18,
        )


_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


def _reason(error: BaseException) -> str:
    """What went wrong with a connection, without addresses or keys."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return "its certificate is not accepted"
    if isinstance(error, _UNREACHED):
        return "it cannot be reached"
    return "the connection broke"
