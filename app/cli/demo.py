"""``llama-gateway demo``: a small model, served and asked through the gateway's own HTTP API."""

from __future__ import annotations

import asyncio
import shlex
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

from app.api import Gateway
from app.backends import LocalBackend
from app.cli.model_store import demo_model
from app.config import Settings
from app.engine.binary import find_engine
from app.errors import AddressInUse, DemoFailed
from app.main import Server, StopRequest, bind, open_gateway
from app.protocol import SSESplitter, Timings, event_data

_MODEL_ID = "smollm2"
_DEFAULT_PORT = 8080
# Its first word waits for the model; an answer may take as long as it goes on.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=300.0)
_MIB = 1 << 20


class Demo:
    """One run of the demo; raises SetupError for what the user has to mend."""

    def __init__(self, *, port: int | None, once: bool, prompt: str, engine: str) -> None:
        self._port = port
        self._once = once
        self._prompt = prompt
        self._engine = engine
        self._out = Console(highlight=False, soft_wrap=True)

    async def run(self, stop: StopRequest) -> None:
        """Fetch, serve, ask; then keep serving until asked to stop, unless it is to be once."""
        engine = await asyncio.to_thread(find_engine, self._engine)
        self._out.print(f"engine   {engine.because}", markup=False)
        model = await asyncio.to_thread(self._fetch)
        with tempfile.TemporaryDirectory(prefix="llama-gateway-demo-") as state:
            settings = self._settings(model, Path(state))
            with self._listen(settings) as listener:
                async with open_gateway(settings, engine) as gateway:
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    server = Server(gateway)
                    serving = asyncio.create_task(server.serve_until(stop, listener))
                    try:
                        await self._show(gateway, url, serving, server)
                        if not self._once:
                            await serving
                    finally:
                        stop.ask()
                        await serving

    def _settings(self, model: Path, state: Path) -> Settings:
        return Settings.model_validate(
            {
                "server": {"port": _DEFAULT_PORT if self._port is None else self._port, "drain_seconds": 5},
                "defaults": {"context": 4096, "parallel": 2, "max_tokens": 256},
                "models": {_MODEL_ID: {"path": model}},
                "state_dir": state,
            }
        )

    def _listen(self, settings: Settings) -> socket.socket:
        """The port that was asked for, or else 8080, or else a free one."""
        try:
            return bind(settings)
        except AddressInUse:
            if self._port is not None:
                raise
            return bind(settings.listening_on(host=None, port=0))

    def _fetch(self) -> Path:
        columns = (TextColumn("fetching the demo model"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=self._out, transient=True, disable=not self._out.is_terminal) as progress:
            task = progress.add_task("fetch", total=None)
            return demo_model(on_progress=lambda done, total: progress.update(task, completed=done, total=total))

    async def _show(self, gateway: Gateway, url: str, serving: asyncio.Task[None], server: Server) -> None:
        await _first(server.started_event.wait(), serving)
        async with aiohttp.ClientSession(url, timeout=_TIMEOUT) as client:
            async with self._spinner("loading the model"):
                backend = await gateway.supervisor.ready(gateway.catalog.resolve(_MODEL_ID))
            assert isinstance(backend, LocalBackend)
            for label, line in zip(("model", "place", "memory"), backend.plan.summary(), strict=True):
                self._out.print(f"{label:<8} {line}", markup=False)
            self._out.print(f"\n> {self._prompt}", markup=False)
            timings = await _first(self._ask(client), serving)
            self._summarise(timings, backend.process.resident_bytes(), url)

    async def _ask(self, client: aiohttp.ClientSession) -> Timings:
        """Stream one answer to the terminal; raises DemoFailed with what the gateway said."""
        body = {
            "model": _MODEL_ID,
            "messages": [{"role": "user", "content": self._prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        timings: Timings | None = None
        splitter = SSESplitter()
        async with client.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise DemoFailed(f"The gateway answered {response.status}: {await response.text()}")
            async for chunk in response.content.iter_any():
                for event in splitter.feed(chunk):
                    timings = self._print_event(event_data(event)) or timings
        self._out.print()
        if timings is None:
            raise DemoFailed("The answer broke off; run the demo again with --debug to see the engine's log.")
        return timings

    def _print_event(self, data: bytes) -> Timings | None:
        if data in (b"", b"[DONE]"):
            return None
        event = orjson.loads(data)
        if event.get("error"):
            raise DemoFailed(f"The gateway broke the answer off: {event['error'].get('message')}")
        for choice in event["choices"]:
            self._out.print(choice["delta"].get("content") or "", end="", markup=False)
        return Timings.read(event["timings"]) if event.get("timings") else None

    def _summarise(self, timings: Timings, engine_bytes: int, url: str) -> None:
        prompt, generation = timings.prompt_tokens_per_second or 0, timings.generation_tokens_per_second or 0
        own_bytes = psutil.Process().memory_info().rss
        body = orjson.dumps({"model": _MODEL_ID, "messages": [{"role": "user", "content": "Hello!"}]}).decode()
        self._out.print(f"\nspeed    prompt {prompt:.0f} tokens/s, answer {generation:.0f} tokens/s")
        self._out.print(f"memory   engine {engine_bytes / _MIB:.0f} MiB, gateway {own_bytes / _MIB:.0f} MiB")
        if not self._once:
            self._out.print(f"\nServing until Ctrl-C. Look at {url}/, or try:", markup=False)
            line = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        else:
            self._out.print("\nNext, with a model of your own:", markup=False)
            line = (
                "llama-gateway serve --model FILE.gguf   and then\n"
                f"curl http://127.0.0.1:{_DEFAULT_PORT}/v1/chat/completions -H 'Content-Type: application/json' "
                f"-d {shlex.quote(body.replace(_MODEL_ID, 'FILE'))}"
            )
        self._out.print(line, markup=False)

    @asynccontextmanager
    async def _spinner(self, what: str) -> AsyncIterator[None]:
        columns = (SpinnerColumn(), TextColumn(what))
        with Progress(*columns, console=self._out, transient=True, disable=not self._out.is_terminal) as progress:
            progress.add_task(what, total=None)
            yield


async def _first(work: Any, serving: asyncio.Task[None]) -> Any:
    """The result of ``work``, unless the server stops first (Ctrl-C)."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        raise asyncio.CancelledError
    return task.result()
