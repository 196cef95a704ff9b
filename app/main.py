"""Composition root: settings → a running gateway, and everything taken down again in reverse."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from app import __version__, views
from app.api import Gateway, install_fault_handlers, router
from app.api.capture import CaptureMiddleware
from app.api.front_door import FrontDoorMiddleware
from app.api.gateway import ReadSettings, refuse_open_door
from app.api.paths import TrailingSlashMiddleware
from app.api.request_id import RequestIdMiddleware
from app.auth import Authenticator
from app.backends import RemoteRules
from app.config import ModelCatalog, ServerConfig, Settings
from app.engine.binary import EngineBinary, find_engine, no_engine
from app.engine.flag_table import FlagTable
from app.errors import AddressInUse, ConfigError
from app.events import EventLog
from app.http_server import GatewayProtocol
from app.images import Images
from app.instance import open_instance
from app.metrics import Metrics
from app.observers import Helper, Observers
from app.proxy import Proxy
from app.quota import Quota, open_store
from app.reloading import Reloader, listen_for_hangups
from app.sampler import Sampler
from app.scheduler import Scheduler
from app.service import ServiceManager
from app.supervisor import Supervisor

if sys.platform == "win32":
    from asyncio import ProactorEventLoop as _new_loop  # noqa: N813 - called for a loop, as the other one is
else:
    from uvloop import new_event_loop as _new_loop

_log = logging.getLogger(__name__)

# What is left to send when all answers have ended or were broken off.
_LAST_BYTES_SECONDS = 2
_ENGINES_STOP_SECONDS = 20.0
_STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT]
if sys.platform == "win32":
    # Ctrl+Break, and what Windows makes of a window that is closed and of a session that ends.
    _STOP_SIGNALS.append(signal.SIGBREAK)
# A request makes several hundred objects; Python's own threshold of 700 looks through them once per request.
_YOUNG_OBJECTS = 10_000


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
    app.state.gateway, app.state.views = gateway, views.Views.of(gateway)
    app.router.routes.extend([*router.routes, *views.routes])
    if gateway.observers is not None and gateway.observers.captures is not None:
        app.add_middleware(CaptureMiddleware, folder=gateway.observers.captures)
    app.add_middleware(TrailingSlashMiddleware)
    app.add_middleware(FrontDoorMiddleware, rules=gateway, metrics=gateway.metrics)
    app.add_middleware(RequestIdMiddleware, traces=gateway.settings.telemetry.otlp is not None)
    install_fault_handlers(app)
    return app


@asynccontextmanager
async def open_gateway(
    settings: Settings,
    engine: EngineBinary,
    *,
    read_settings: ReadSettings | None = None,
    remote_rules: RemoteRules | None = None,
) -> AsyncIterator[Gateway]:
    """The parts of a gateway, built bottom-up; leaving stops every engine and removes the run folder.

    Raises ModelFileError for a model that cannot be read and StorageError for a state folder that cannot be written or
    that another gateway uses. ``read_settings`` is what a reload reads.
    """
    catalog, metrics, events = ModelCatalog(settings), Metrics(), EventLog()
    metrics.build.info({"version": __version__, "engine": f"{engine.kind} {engine.version}"})
    with open_instance(settings.state_dir) as instance:
        supervisor = Supervisor(
            catalog,
            engine=engine,
            memory=settings.memory,
            run_dir=instance.run_dir,
            metrics=metrics,
            events=events,
            load_wait_seconds=settings.server.load_wait,
            records=instance.records,
            instance=instance.name,
            learned=settings.state_dir / "learned.json",
            remote_rules=remote_rules,
            conversations=settings.state_dir / "conversations",
        )
        scheduler = Scheduler(metrics)
        quota = _quota(settings)
        observers = Observers.of(settings, metrics, events)
        proxy = Proxy(
            catalog=catalog,
            supervisor=supervisor,
            scheduler=scheduler,
            metrics=metrics,
            quota=quota,
            images=Images(settings.images),
            observers=observers.told(),
        )
        authenticator = Authenticator(settings.keys)
        gateway = Gateway(settings, catalog, authenticator, supervisor, scheduler, metrics, events, proxy)
        gateway.read_settings = read_settings
        gateway.observers = observers
        try:
            await quota.open()
            async with _running(_sampler(gateway, observers), *observers.helpers()):
                supervisor.start()
                yield gateway
        finally:
            await supervisor.close()
            await quota.close()


def _sampler(gateway: Gateway, observers: Observers) -> Sampler:
    return Sampler(
        gateway.metrics,
        supervisor=gateway.supervisor,
        scheduler=gateway.scheduler,
        quota=gateway.proxy.quota,
        keys=lambda: gateway.authenticator,
        slowdowns=observers.slowdowns,
    )


def _quota(settings: Settings) -> Quota:
    store = settings.quota.store or f"sqlite:{settings.state_dir / 'quota.db'}"
    return Quota(open_store(store, base=settings.state_dir, fail_open=settings.quota.fail == "open"))


@asynccontextmanager
async def _running(*helpers: Helper) -> AsyncIterator[None]:
    """Run each beside the block, then cancel them."""
    tasks = [asyncio.create_task(one.run(), name=type(one).__name__) for one in helpers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bind(settings: Settings) -> socket.socket:
    """A listening socket; raises ConfigError for an open door and AddressInUse for a taken port."""
    host, port = settings.server.host, settings.server.port
    refuse_open_door(settings)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise AddressInUse(
            f"Cannot listen on {host} port {port} ({error.strerror}); stop the other program or choose another --port."
        ) from None


def check_certificate(server: ServerConfig) -> None:
    """Raises ConfigError for a certificate and key that https cannot be served with."""
    if server.tls_certificate is None or server.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(server.tls_certificate, server.tls_key)
    except OSError as error:
        raise ConfigError(
            f"https cannot be served with {server.tls_certificate} and {server.tls_key} "
            f"({getattr(error, 'reason', None) or error.strerror}); they must be PEM files that belong together."
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

    def __init__(self, gateway: Gateway, service: ServiceManager | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(gateway),
                # Never h11: it accepts requests with both Content-Length and Transfer-Encoding.
                http=GatewayProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                ssl_certfile=gateway.settings.server.tls_certificate,
                ssl_keyfile=gateway.settings.server.tls_key,
                # The address of a client decides nothing here, so no header may claim one.
                proxy_headers=False,
                timeout_keep_alive=75,
                # Answers have ended by then: the draining is ours.
                timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
            )
        )
        self._gateway = gateway
        self._service = service or ServiceManager({})
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
        """Refuse what is new while still listening (``/readyz`` says so), let open answers end, then leave."""
        await stop.asked.wait()
        self._gateway.is_draining = True
        seconds = self._gateway.settings.server.drain_seconds
        self._service.stopping(within_seconds=seconds + _ENGINES_STOP_SECONDS)
        drain = asyncio.create_task(self._gateway.proxy.drain(seconds))
        insisted = asyncio.create_task(stop.insisted.wait())
        try:
            await asyncio.wait([drain, insisted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            drain.cancel()
            insisted.cancel()
            await asyncio.gather(drain, insisted, return_exceptions=True)
            self.should_exit = True

    async def _hurry(self, stop: StopRequest) -> None:
        await stop.insisted.wait()
        self.force_exit = True


def run(main: Callable[[StopRequest], Coroutine[Any, Any, None]]) -> None:
    """Run the main coroutine on the fast loop; SIGTERM and SIGINT (Ctrl+C) ask it to stop, on Windows Ctrl+Break too.

    Raises KeyboardInterrupt when it could not.
    """
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        try:
            runner.run(_with_signals(main))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _with_signals(main: Callable[[StopRequest], Coroutine[Any, Any, None]]) -> None:
    stop, loop = StopRequest(), asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        try:
            loop.add_signal_handler(number, stop.ask)
        except NotImplementedError:
            # Windows has signals, but its loop has no handlers for them.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.ask))
    await main(stop)


def _spare_the_collector() -> None:
    """What there is when serving begins stays to the end: looking through it for garbage would hold up every stream.

    A full look at the half million objects of our libraries takes some 50 ms, and comes once in a thousand requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def _engine(settings: Settings) -> EngineBinary:
    needs_one = any(entry.path is not None for entry in settings.models.values())
    if not needs_one:
        return no_engine()
    return find_engine(settings.engine.binary, flag_table=FlagTable(settings.state_dir / "engine-flags.json"))


async def serve(
    settings: Settings,
    stop: StopRequest,
    *,
    read_settings: ReadSettings | None = None,
    config_file: Path | None = None,
) -> None:
    """Serve until asked to stop; raises SetupError for what the operator has to mend.

    SIGHUP reads the configuration again with ``read_settings``; without one it stops the gateway, as a terminal that
    closes means it. ``config_file`` is watched when the configuration says so.
    """
    service, reload_asked = ServiceManager(), asyncio.Event()
    # From the start: one that comes while engines are looked for is answered once there is something to reload.
    listen_for_hangups(stop.ask if read_settings is None else reload_asked.set)
    check_certificate(settings.server)
    with bind(settings) as listener:
        engine = await asyncio.to_thread(_engine, settings)
        _log.info("engine: %s", engine.because)
        async with open_gateway(settings, engine, read_settings=read_settings) as gateway:
            host, port = listener.getsockname()[:2]
            names = ", ".join(model.id for model in gateway.catalog)
            server = Server(gateway, service)
            reloader = Reloader(gateway, service, file=config_file, asked=reload_asked)
            helpers = [
                asyncio.create_task(service.feed_watchdog(), name="watchdog"),
                asyncio.create_task(reloader.run(), name="reload"),
                asyncio.create_task(_say_ready(server, service, f"serving {names}"), name="ready"),
            ]
            scheme = "http" if settings.server.tls_certificate is None else "https"
            _log.info("serving %s on %s://%s:%d/v1", names, scheme, f"[{host}]" if ":" in host else host, port)
            _spare_the_collector()
            try:
                await server.serve_until(stop, listener)
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)


async def _say_ready(server: Server, service: ServiceManager, status: str) -> None:
    await server.started_event.wait()
    service.ready(status)
