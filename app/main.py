"""Composition root: settings → a running gateway, and everything taken down again in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI

from app.api import Gateway, install_fault_handlers, router
from app.api.request_id import RequestIdMiddleware
from app.auth import Authenticator
from app.config import ModelCatalog, Settings
from app.engine.binary import EngineBinary, find_engine
from app.errors import AddressInUse, ConfigError, StorageError
from app.metrics import Metrics
from app.proxy import Proxy
from app.sampler import sample_forever
from app.scheduler import Scheduler
from app.supervisor import Supervisor

if sys.platform != "win32":
    import uvloop

_log = logging.getLogger(__name__)

# sun_path holds 107 bytes and a socket's file name takes 14 with its slash.
_LONGEST_RUN_DIR = 107 - 14


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application of a gateway: the allow-list of routes, error shapes, request ids."""
    app = FastAPI(
        title="llama-gateway",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.gateway = gateway
    app.router.routes.extend(router.routes)
    app.add_middleware(RequestIdMiddleware)
    install_fault_handlers(app)
    return app


@asynccontextmanager
async def open_gateway(settings: Settings, engine: EngineBinary) -> AsyncIterator[Gateway]:
    """The parts of a gateway, built bottom-up; leaving stops every engine and removes the run folder.

    Raises ModelFileError for a model that cannot be read and StorageError for a state folder that cannot be written.
    """
    catalog, metrics = ModelCatalog(settings), Metrics()
    run_dir = _make_run_dir(settings.state_dir)
    try:
        supervisor = Supervisor(catalog, engine=engine, memory=settings.memory, run_dir=run_dir, metrics=metrics)
        scheduler = Scheduler(metrics)
        proxy = Proxy(catalog=catalog, supervisor=supervisor, scheduler=scheduler, metrics=metrics)
        authenticator = Authenticator(settings.keys)
        sampler = asyncio.create_task(sample_forever(metrics, supervisor), name="sampler")
        try:
            yield Gateway(settings, catalog, authenticator, supervisor, scheduler, metrics, proxy)
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
            await supervisor.close()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def bind(settings: Settings) -> socket.socket:
    """A listening socket; raises ConfigError for an open door and AddressInUse for a taken port."""
    host, port = settings.server.host, settings.server.port
    if not settings.server.is_loopback and not settings.keys:
        raise ConfigError(
            f"Listening on {host} would let everybody on the network use this gateway, since no keys are configured; "
            "run `llama-gateway keys new NAME` and add the printed line, or listen on 127.0.0.1."
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise AddressInUse(
            f"Cannot listen on {host} port {port} ({error.strerror}); stop the other program or choose another --port."
        ) from None


class StopRequest:
    """The wish to stop: ``asked`` by the first signal, ``insisted`` on by the second."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def ask(self) -> None:
        """Ask, or insist."""
        if self.asked.is_set():
            self.insisted.set()
        self.asked.set()


class Server(uvicorn.Server):
    """uvicorn for one gateway; ``started_event`` is set once it accepts requests."""

    def __init__(self, gateway: Gateway) -> None:
        server = gateway.settings.server
        super().__init__(
            uvicorn.Config(
                create_app(gateway),
                # Never h11: it accepts requests with both Content-Length and Transfer-Encoding.
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                # The address of a client decides nothing here, so no header may claim one.
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=round(server.drain_seconds),
            )
        )
        self._gateway = gateway
        self.started_event = asyncio.Event()

    async def serve_until(self, stop: StopRequest, listener: socket.socket) -> None:
        """Serve until the stop is asked for; let open answers end unless it is insisted on."""
        watchers = [asyncio.create_task(self._drain(stop)), asyncio.create_task(self._hurry(stop))]
        try:
            await self.serve(sockets=[listener])
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets)
        self.started_event.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by ``run``, which also hears those that come before the server has started."""
        yield

    async def _drain(self, stop: StopRequest) -> None:
        await stop.asked.wait()
        self._gateway.is_draining = True
        self.should_exit = True

    async def _hurry(self, stop: StopRequest) -> None:
        await stop.insisted.wait()
        self.force_exit = True


def run(main: Callable[[StopRequest], Coroutine[Any, Any, None]]) -> None:
    """Run the main coroutine on the fast loop; SIGTERM and SIGINT ask it to stop."""
    factory = None if sys.platform == "win32" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_with_signals(main))


async def _with_signals(main: Callable[[StopRequest], Coroutine[Any, Any, None]]) -> None:
    stop, loop = StopRequest(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stop.ask)
        except NotImplementedError:
            # Windows has signals, but its loop has no handlers for them.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.ask))
    await main(stop)


async def serve(settings: Settings, stop: StopRequest) -> None:
    """Serve until asked to stop; raises SetupError for what the operator has to mend."""
    with bind(settings) as listener:
        engine = await asyncio.to_thread(find_engine, settings.engine.binary)
        _log.info("engine: %s", engine.because)
        async with open_gateway(settings, engine) as gateway:
            host, port = listener.getsockname()[:2]
            names = ", ".join(model.id for model in gateway.catalog)
            _log.info("serving %s on http://%s:%d/v1", names, f"[{host}]" if ":" in host else host, port)
            await Server(gateway).serve_until(stop, listener)


def _make_run_dir(state_dir: Path) -> Path:
    """A private folder for this process's sockets; folders of processes that are gone are removed first."""
    run_dir = state_dir / "run" / str(os.getpid())
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left_behind in run_dir.parent.iterdir():
            if left_behind.name.isdecimal() and not psutil.pid_exists(int(left_behind.name)):
                shutil.rmtree(left_behind, ignore_errors=True)
        if len(os.fsencode(run_dir)) > _LONGEST_RUN_DIR:
            return Path(tempfile.mkdtemp(prefix="llama-gateway-"))
        with suppress(FileExistsError):
            run_dir.mkdir(mode=0o700)
    except OSError as error:
        raise StorageError(
            f"Cannot write to {state_dir} ({error.strerror}); set state_dir to a folder that this user may write."
        ) from None
    return run_dir
