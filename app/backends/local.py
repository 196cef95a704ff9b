"""One llama-server of our own: its process, its connection, its real limits."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from app.backends.abilities import learn_abilities
from app.backends.base import CHAT_ROUTE
from app.backends.conversations import Conversations
from app.backends.departure import Departure, landed
from app.backends.faults import engine_fault, read_object
from app.backends.liveness import Flight, Liveness, Patience
from app.engine.binary import EngineBinary
from app.engine.client import EngineClient
from app.engine.command import Endpoint, build_argv, child_environment, shares_cells
from app.engine.connection import Response, Sink
from app.engine.process import EngineExit, EngineProcess, LaunchSpec, State
from app.engine.records import INSTANCE_VARIABLE
from app.engine.report import MeasuredMemory
from app.errors import EngineGone, EngineUnusable, StorageError, UpstreamFailed
from app.offload import OffloadPlan
from app.protocol import Abilities
from app.tokens import TokenCounter, learn_counter, read_vocabulary
from app.trace_context import outgoing_headers

_log = logging.getLogger(__name__)

# The progress of a prompt comes once per batch: it is given twice the time that such a batch should take, where a
# prompt runs at least four times as fast as an answer.
_SLOW_BATCHES = 2.0
_PROMPT_FACTOR = 4.0


class _RouteMissingError(Exception):
    """This build of the engine has no such route."""


class _EngineReply:
    def __init__(self, response: Response, flight: Flight) -> None:
        self._response = response
        self._flight = flight

    async def read(self) -> bytes:
        """What has come, after waiting for the first of it; empty at the end."""
        flight = self._flight
        flight.is_awaited = True
        chunk = await self._response.read()
        # A comment is the HTTP server's ping: it comes from a hanging engine too.
        flight.chunks += not chunk.startswith(b":")
        flight.is_awaited = False
        return chunk

    def hand_to(self, sink: Sink) -> None:
        """From now on give ``sink`` what arrives, at once; what it does not take is for ``read``, in order."""
        flight = self._flight

        def count(chunk: bytes) -> bool:
            if not sink(chunk):
                return False
            flight.chunks += not chunk.startswith(b":")
            return True

        self._response.hand_to(count)

    async def read_all(self) -> bytes:
        """All that comes until the end."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)


class LocalBackend:
    """A supervised llama-server. ``start`` makes it ready, ``close`` leaves nothing behind."""

    # What the engine says of its cells, where its slots share them.
    pool_tokens: int | None = None

    def __init__(
        self,
        plan: OffloadPlan,
        engine: EngineBinary,
        *,
        model_id: str,
        run_dir: Path,
        environment: Mapping[str, str],
        extra_args: Sequence[str] = (),
        patience: Patience | None = None,
        records: Path | None = None,
        instance: str = "",
        conversations: Conversations | None = None,
    ) -> None:
        self.plan = plan
        self.model_id = model_id
        self._patience = _with_slow_batches(patience or Patience(), plan)
        self._key = secrets.token_urlsafe(32)
        # The folder is private (0700), and its name short: a socket path may have 107 bytes.
        stem = secrets.token_hex(4)
        self._key_file = run_dir / f"{stem}.key"
        self.endpoint = _endpoint(run_dir / f"{stem}.sock")
        self.process = EngineProcess(
            LaunchSpec(
                name=model_id,
                argv=build_argv(
                    plan,
                    engine,
                    alias=model_id,
                    endpoint=self.endpoint,
                    key_file=self._key_file,
                    extra_args=tuple(extra_args),
                    slot_save_path=conversations.folder if conversations is not None else None,
                ),
                environment=child_environment(environment) | ({INSTANCE_VARIABLE: instance} if instance else {}),
                endpoint=self.endpoint,
                api_key=self._key,
                stall_seconds=self._patience.stall_seconds,
                records=records,
            )
        )
        self._liveness = Liveness(self.endpoint, self._patience, on_hang=self.process.declare_hung)
        self._watch: asyncio.Task[None] | None = None
        self._client: EngineClient | None = None
        self._counter: TokenCounter | None = None
        self.slots = 0
        self._conversations = conversations
        self.chooses_slots = False  # until saved conversations are back: the engine finds the slot of each
        self.abilities = Abilities()

    @property
    def is_ready(self) -> bool:
        """Whether a request may be sent now."""
        return self._counter is not None and self.process.state is State.READY

    @property
    def counter(self) -> TokenCounter:
        """Counts prompts against the real context of a slot; only after ``start``."""
        if self._counter is None:
            raise RuntimeError("the engine has not been started")
        return self._counter

    @property
    def measured(self) -> MeasuredMemory:
        """What the engine's log says it allocated."""
        return self.process.measured

    async def start(self) -> None:
        """Load the model and learn the engine's real limits; raises EngineDied, StorageError or UpstreamFailed."""
        self._open_folder()
        self._write_key()
        try:
            self.process.start()
            await self.process.wait_ready()
        finally:
            # The engine has read it by now.
            self._key_file.unlink(missing_ok=True)
        self._client = EngineClient(self.endpoint, api_key=self._key)
        self._watch = asyncio.create_task(self._liveness.watch(), name=f"liveness of {self.model_id}")
        await self._learn_limits()
        if self._conversations is not None:
            tokens = await self._conversations.restore(self._ask_slots)
            self.chooses_slots = tokens > 0
            _log.info("model %s: %d tokens of earlier conversations are there again", self.model_id, tokens)

    async def wait_exit(self) -> EngineExit:
        """Wait for the engine's end."""
        return await self.process.wait_exit()

    async def close(self) -> None:
        """Stop the engine and close the connections; idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._conversations is not None and self.is_ready:
            await self._conversations.save(self._ask_slots)
        # First the connections: an open stream would keep the engine from leaving at once.
        if self._client is not None:
            self._client.close()
        await self.process.stop()
        if self.endpoint.socket is not None:
            self.endpoint.socket.unlink(missing_ok=True)

    @asynccontextmanager
    async def open(
        self, body: bytes, route: str = CHAT_ROUTE, *, departure: Departure | None = None
    ) -> AsyncIterator[_EngineReply]:
        """Start an answer; leaving the context closes the engine's socket, which frees the slot."""
        try:
            with self._liveness.flight() as flight:
                response = await self._begin(route, body, departure)
                try:
                    if response.status != 200:
                        raise engine_fault(response.status, await response.read_all())
                    yield _EngineReply(response, flight)
                except asyncio.CancelledError:
                    if departure is not None:
                        await departure.let_go(response, self.process.releases)
                    raise
                finally:
                    response.close()
        except OSError as error:
            raise EngineGone("The engine ended in the middle of the answer; send the request again.") from error

    async def query(self, route: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question that is no stream."""
        async with self.open(orjson.dumps(document), route) as reply:
            content = await reply.read_all()
        return read_object(content)

    async def busy_slots(self) -> int:
        """Slots that the engine is working on; not to be asked often, since each answer wakes all its waiters."""
        slots = await self._ask("/slots")
        return sum(1 for slot in slots if slot["is_processing"])

    async def count_chat(self, body: bytes) -> int:
        """Exact prompt tokens of a chat body."""
        try:
            answer = await self._ask("/v1/chat/completions/input_tokens", body)
        except _RouteMissingError:
            # Builds before the middle of 2026.
            rendered = await self._ask("/apply-template", body)
            return await self.tokenize(str(rendered["prompt"]), special=True)
        return int(answer["input_tokens"])

    async def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text that the model's template makes of these messages."""
        return await self.render(orjson.dumps({"messages": messages}))

    async def render(self, body: bytes) -> str:
        """The prompt text that the model's template makes of a chat body, tools included."""
        return str((await self._ask("/apply-template", body))["prompt"])

    async def tokenize(self, text: str, *, special: bool = False) -> int:
        """Tokens of a text; with ``special`` as the engine counts a rendered prompt, BOS included."""
        body = orjson.dumps({"content": text, "add_special": special, "parse_special": True})
        return len((await self._ask("/tokenize", body))["tokens"])

    async def _begin(self, route: str, body: bytes, departure: Departure | None) -> Response:
        """The response's head; a client that leaves meanwhile leaves once it is known whether the engine has begun."""
        if departure is None:
            return await self._post(route, body)
        start = asyncio.ensure_future(self._post(route, body))
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if (response := await landed(start)) is not None:
                await departure.let_go(response, self.process.releases)
            raise

    async def _post(self, path: str, body: bytes) -> Response:
        """One POST, sent again once when it found a kept connection closed.

        The engine closes each after 100 requests or 5 s without a word of warning; it sends a response's head when it
        begins, so what failed before the head has not begun.
        """
        if self._client is None:
            raise EngineGone("The engine is not running; send the request again.")
        trace = outgoing_headers()
        try:
            return await self._client.post(path, body, trace)
        except OSError:
            if self.process.state is not State.READY:
                raise
            return await self._client.post(path, body, trace)

    async def _ask(self, path: str, body: bytes | None = None) -> Any:
        """A small question outside the slots; raises _RouteMissingError for a route that this build lacks."""
        try:
            response = await self._get(path) if body is None else await self._post(path, body)
            with closing(response):
                content = await response.read_all()
        except OSError as error:
            raise EngineGone("The engine ended before it could answer; send the request again.") from error
        if response.status == 404:
            raise _RouteMissingError(path)
        if response.status != 200:
            raise engine_fault(response.status, content)
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise UpstreamFailed(f"The engine answered {path} with something that is not JSON.") from error

    async def _get(self, path: str) -> Response:
        if self._client is None:
            raise EngineGone("The engine is not running; send the request again.")
        return await self._client.get(path)

    async def _learn_limits(self) -> None:
        try:
            properties = await self._ask("/props")
            models = await self._ask("/v1/models")
            self.slots = int(properties["total_slots"])
            context_tokens = int(properties["default_generation_settings"]["n_ctx"])
            if shares_cells(self.process.spec.argv):
                # Each of the slots says that the whole pool is its own.
                self.pool_tokens = context_tokens
                context_tokens = min(context_tokens, self.plan.placement.cells)
            meta = models["data"][0]["meta"]
            vocabulary_type = int(meta.get("vocab_type") or 0)
            vocabulary_size = int(meta.get("n_vocab") or 0) or None
        except (_RouteMissingError, KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineUnusable(
                f"This llama-server does not tell its limits ({error!r}); use a build of 2026 or later."
            ) from error
        self._counter = await learn_counter(
            self,
            context_tokens=context_tokens,
            vocabulary_type=vocabulary_type,
            vocabulary_size=vocabulary_size,
            pre_tokenizer=str(self.plan.model.metadata.get("tokenizer.ggml.pre") or ""),
            vocabulary=await asyncio.to_thread(read_vocabulary, self.plan.model.path),
        )
        self.abilities = await learn_abilities(self, properties)
        _log.info("model %s: %d slots of %d tokens", self.model_id, self.slots, context_tokens)

    async def _ask_slots(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            return await self._ask(path, None if body is None else orjson.dumps(body))
        except _RouteMissingError as error:
            raise UpstreamFailed(f"This engine has no route {path}.") from error

    def _open_folder(self) -> None:
        if self._conversations is None:
            return
        try:
            self._conversations.open()
        except OSError as error:
            raise StorageError(
                f"Cannot write to {self._conversations.folder} ({error.strerror}); correct state_dir, or leave out "
                "keep_conversations."
            ) from None

    def _write_key(self) -> None:
        try:
            descriptor = os.open(self._key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self._key + "\n")
        except OSError as error:
            raise StorageError(
                f"Cannot write to {self._key_file.parent} ({error.strerror}); free some space or set state_dir."
            ) from None


def _endpoint(path: Path) -> Endpoint:
    """A private socket; on Windows, whose Python has none, a port of the loopback, which is open by our key alone."""
    return Endpoint.on_loopback() if sys.platform == "win32" else Endpoint(socket=path)


def _with_slow_batches(patience: Patience, plan: OffloadPlan) -> Patience:
    decode = plan.expected.decode_tokens_per_second
    speed = plan.expected.prompt_tokens_per_second or (decode and decode * _PROMPT_FACTOR)
    if not speed:
        return patience
    batch_seconds = plan.placement.batch / speed
    return replace(patience, silence_seconds=max(patience.silence_seconds, _SLOW_BATCHES * batch_seconds))
