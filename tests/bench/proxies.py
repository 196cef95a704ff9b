"""The participants: how each is started in front of the same fake engine, where it listens, which pids it is."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .processes import CannotRun, children, free_port, running, wait_until

FAKE_ENGINE = Path(__file__).resolve().parents[1] / "fake_engine.py"
MODEL = "demo"
KEY = "bench-key-that-opens-nothing"
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all participants share."""

    folder: Path  # for sockets, configurations and logs; removed at the end
    streams: int
    rate: float  # chunks per second of each stream
    context: int  # tokens of each slot
    engine: Path | None = None  # the native llama-server whose router is measured
    model: Path | None = None  # a GGUF file, whose header router and gateway read; the fake engine never does
    gateway_command: str = ""
    litellm: Path | None = None  # the program `litellm` of an environment of its own
    digests: Path | None = None  # where the fake engine writes "ID SHA256" of each stream

    def environment(self) -> dict[str, str]:
        """For the fake engine and everybody who starts it: without LLAMA_*, with the switches."""
        switches: dict[str, object] = {
            "chunks": 10**9,
            "chunk_interval_seconds": 1 / self.rate,
            "spread_phases": True,
            "nctx": self.context,
            "slots": self.streams,  # also more than a real engine may be given
            "digests": str(self.digests or ""),
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "LD_"))}
        return clean | {"FAKE_ENGINE": json.dumps(switches)}

    def fake_engine(self) -> Path:
        """A shell wrapper that starts the fake engine as if it were llama-server."""
        wrapper = self.folder / "fake-llama-server"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE_ENGINE))} "$@"\n')
        wrapper.chmod(0o755)
        return wrapper


@dataclass(frozen=True, slots=True)
class Target:
    """A participant that runs."""

    port: int
    proxy_pids: tuple[int, ...] = ()
    engine_pids: tuple[int, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    rewrites: bool = False  # makes events of its own from those of the engine


def answers(port: int, *, path: str = "/health", headers: Mapping[str, str] | None = None, body: str = "") -> bool:
    """Whether a request is answered with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body or None, dict(headers or {}))
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def completes(target: Target, model: str = MODEL) -> bool:
    """One small chat completion: whatever starts on demand has started after it."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    headers = {"Content-Type": "application/json", **target.headers}
    return answers(target.port, path="/v1/chat/completions", headers=headers, body=json.dumps(body))


@contextlib.contextmanager
def run_engine(setting: Setting, *, host: str, port: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """The fake engine on a socket or port."""
    argv = [str(setting.fake_engine()), "--host", host, "--port", str(port), "--alias", MODEL]
    argv += ["-c", str(setting.context * setting.streams), "-np", str(setting.streams)]
    log = setting.folder / "engine.log"
    with running(argv, log=log, env=setting.environment()) as engine:
        wait_until(lambda: "model loaded" in log.read_text(), engine, what="The fake engine", log=log, seconds=15)
        yield engine


@contextlib.contextmanager
def run_direct(setting: Setting) -> Iterator[Target]:
    port = free_port()
    with run_engine(setting, host="127.0.0.1", port=port) as engine:
        yield Target(port, engine_pids=(engine.pid,))


NGINX = """
daemon off; {user} worker_processes 1; pid {folder}/nginx.pid; error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engine {{ server unix:{folder}/engine.sock; keepalive 128; keepalive_timeout 4s; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 1h;
    }}
  }}
}}
"""


@contextlib.contextmanager
def run_nginx(setting: Setting) -> Iterator[Target]:
    binary = shutil.which("nginx", path=SYSTEM_PATH)
    if binary is None:
        raise CannotRun("nginx is not installed: apt-get install nginx-light.")
    port = free_port()
    user = "user root;" if os.geteuid() == 0 else ""
    configuration, log = setting.folder / "nginx.conf", setting.folder / "nginx.log"
    configuration.write_text(NGINX.format(folder=setting.folder, port=port, user=user))
    argv = [binary, "-p", str(setting.folder), "-c", str(configuration), "-e", str(log)]
    with run_engine(setting, host=str(setting.folder / "engine.sock")) as engine, running(argv, log=log) as nginx:
        wait_until(lambda: answers(port), nginx, what="nginx", log=log, seconds=10)
        yield Target(port, proxy_pids=(nginx.pid, *children(nginx.pid)), engine_pids=(engine.pid,))


HAPROXY = """
global
  maxconn 4096
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  option http-no-delay
frontend clients
  bind 127.0.0.1:{port}
  default_backend engine
backend engine
  http-reuse always
  retry-on conn-failure empty-response
  server engine unix@{folder}/engine.sock pool-purge-delay 3s
"""


@contextlib.contextmanager
def run_haproxy(setting: Setting) -> Iterator[Target]:
    binary = shutil.which("haproxy", path=SYSTEM_PATH)
    if binary is None:
        raise CannotRun("HAProxy is not installed: apt-get install haproxy.")
    port, configuration, log = free_port(), setting.folder / "haproxy.cfg", setting.folder / "haproxy.log"
    configuration.write_text(HAPROXY.format(folder=setting.folder, port=port))
    argv = [binary, "-db", "-f", str(configuration)]
    with run_engine(setting, host=str(setting.folder / "engine.sock")) as engine, running(argv, log=log) as haproxy:
        wait_until(lambda: answers(port), haproxy, what="HAProxy", log=log, seconds=10)
        yield Target(port, proxy_pids=(haproxy.pid, *children(haproxy.pid)), engine_pids=(engine.pid,))


@contextlib.contextmanager
def run_litellm(setting: Setting) -> Iterator[Target]:
    """One worker, no database, nothing looked up on the network."""
    if setting.litellm is None:
        raise CannotRun("LiteLLM needs --litellm (the program of an environment with litellm[proxy]).")
    engine_port, port = free_port(), free_port()
    configuration, log = setting.folder / "litellm.yaml", setting.folder / "litellm.log"
    model = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{engine_port}/v1", "api_key": "none"}
    configuration.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": model}]}))
    argv = [str(setting.litellm), "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port)]
    # It refuses to start without a key, or with one that is short.
    key = "sk-" + hashlib.sha256(KEY.encode()).hexdigest()
    env = {**setting.environment(), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    headers = {"Authorization": f"Bearer {key}"}
    with run_engine(setting, host="127.0.0.1", port=engine_port) as engine, running(argv, log=log, env=env) as proxy:
        target = Target(port, (proxy.pid,), (engine.pid,), headers, rewrites=True)
        wait_until(lambda: answers(port, path="/health/liveliness"), proxy, what="LiteLLM", log=log, seconds=120)
        wait_until(lambda: completes(target), proxy, what="The model behind LiteLLM", log=log, seconds=30)
        yield target


@contextlib.contextmanager
def run_router(setting: Setting) -> Iterator[Target]:
    """llama.cpp's router, whose child is the fake engine.

    The router reads the path of its own executable once, when it starts, and starts its children by that path. So a
    private copy of the executable runs, and once it answers the file is replaced by the wrapper of the fake engine.
    """
    if setting.engine is None or setting.model is None:
        raise CannotRun("The router needs --engine (a native llama-server) and --model (a GGUF file).")
    folder = setting.folder / "router"
    folder.mkdir()
    copy, log, port = folder / "llama-server", folder / "router.log", free_port()
    shutil.copy2(find_executable(setting, setting.engine), copy)
    argv = router_argv(setting, copy, port)
    with running(argv, log=log, env=setting.environment()) as router:
        wait_until(lambda: answers(port), router, what="The router", log=log, seconds=20)
        setting.fake_engine().replace(copy)
        target = Target(port)
        wait_until(lambda: completes(target), router, what="The model behind the router", log=log, seconds=30)
        yield Target(port, proxy_pids=(router.pid,), engine_pids=tuple(children(router.pid)))


def router_argv(setting: Setting, executable: Path, port: int) -> list[str]:
    """One model from a preset; a thread for each stream, which the router's default would not have."""
    preset = setting.folder / "router.ini"
    preset.write_text(f"[{MODEL}]\nmodel = {setting.model}\nc = {setting.context}\nnp = {setting.streams}\n")
    threads = str(setting.streams + 16)
    listen = ["--host", "127.0.0.1", "--port", str(port), "--threads-http", threads]
    return [str(executable), "--models-preset", str(preset), "--no-ui", *listen]


def find_executable(setting: Setting, engine: Path) -> Path:
    """The ELF file behind `engine`, which may be a shell wrapper: what /proc/PID/exe of a running one names."""
    if engine.read_bytes()[:4] == b"\x7fELF":
        return engine
    port, log = free_port(), setting.folder / "probe.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    with running(router_argv(setting, engine, port), log=log, env=environment) as probe:
        wait_until(lambda: answers(port), probe, what=str(engine), log=log, seconds=20)
        return Path(f"/proc/{probe.pid}/exe").readlink()


@contextlib.contextmanager
def run_gateway(setting: Setting) -> Iterator[Target]:
    """Everything on: a key, the gate, metrics, accounting, logging."""
    if setting.model is None:
        raise CannotRun("The gateway needs --model (a GGUF file).")
    folder = setting.folder / "gateway"
    folder.mkdir()
    port, log, configuration = free_port(), folder / "gateway.log", folder / "config.yaml"
    configuration.write_text(json.dumps(gateway_configuration(setting, port)))
    argv = [word.replace("{config}", str(configuration)) for word in shlex.split(setting.gateway_command)]
    with running(argv, log=log, env=setting.environment()) as gateway:
        wait_until(lambda: answers(port, path="/livez"), gateway, what="The gateway", log=log, seconds=30)
        target = Target(port, headers={"Authorization": f"Bearer {KEY}"})
        wait_until(lambda: completes(target), gateway, what="The model behind the gateway", log=log, seconds=30)
        engines = tuple(
            pid for pid in children(gateway.pid) if b"fake_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        yield Target(port, proxy_pids=(gateway.pid,), engine_pids=engines, headers=target.headers)


def gateway_key() -> dict[str, object]:
    return {"name": "bench", "hash": "sha256:" + hashlib.sha256(KEY.encode()).hexdigest(), "models": ["*"]}


def gateway_configuration(setting: Setting, port: int) -> dict[str, object]:
    """JSON is YAML, too. The model has one slot in the plan, and as many as the fake engine says it has."""
    model = {"path": str(setting.model), "context": setting.context}
    return {
        "server": {"host": "127.0.0.1", "port": port, "drain_seconds": 1},
        "engine": {"binary": str(setting.fake_engine())},
        "models": {MODEL: model},
        "keys": [gateway_key()],
        "state_dir": str(setting.folder / "state"),
    }


PARTICIPANTS: dict[str, Callable[[Setting], contextlib.AbstractContextManager[Target]]] = {
    "direct": run_direct,
    "nginx": run_nginx,
    "haproxy": run_haproxy,
    "router": run_router,
    "gateway": run_gateway,
    "litellm": run_litellm,
}


def settle(seconds: float = 0.5) -> None:
    """What the start left to do is not to be counted as relaying."""
    time.sleep(seconds)
