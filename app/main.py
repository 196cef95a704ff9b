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
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
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


class Server(uvicorn.Server):
    """uvicorn, telling the gateway first that it stops; ``started_event`` is set once it accepts requests."""

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
                timeout_keep_alive=75,
                timeout_graceful_shutdown=round(server.drain_seconds),
            )
        )
        self._gateway = gateway
        self.started_event = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets)
        self.started_event.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop: no new traffic from here on."""
        self._gateway.is_draining = True
        super().handle_exit(sig, frame)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the main coroutine on the fast loop; SIGTERM and SIGINT stop it gently and the exit code is 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again after it has shut down; nothing is left to do then.
        signal.signal(number, _already_stopped)
    factory = None if sys.platform == "win32" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def serve(settings: Settings) -> None:
    """Serve until a signal; raises SetupError for what the operator has to mend."""
    listener = bind(settings)
    with listener:
        engine = await asyncio.to_thread(find_engine, settings.engine.binary)
        _log.info("engine: %s", engine.because)
        async with open_gateway(settings, engine) as gateway:
            host, port = listener.getsockname()[:2]
            _log.info("serving %s on http://%s:%d/v1", ", ".join(m.id for m in gateway.catalog), host, port)
            await Server(gateway).serve(sockets=[listener])


def _already_stopped(number: int, frame: FrameType | None) -> None:
    pass


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
