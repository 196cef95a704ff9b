"""Real parts for every test: the demo model, both engines, a gateway process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.model_store import demo_model as fetch_demo_model
from tests.gateway import GatewayProcess, running_gateway
from tests.written_config import Write

CONTEXT_TOKENS = 1024
MODEL_ID = "smollm2"
_INSTALLED_ENGINE = Path("/opt/llama-gateway-engine/bin/llama-server")


def _native_engine() -> Path | None:
    """deploy/native-engine-debian.sh installs one; another is named by GATEWAY_TEST_ENGINE or stands on PATH."""
    named = os.environ.get("GATEWAY_TEST_ENGINE") or shutil.which("llama-server")
    if named:
        return Path(named)
    return _INSTALLED_ENGINE if _INSTALLED_ENGINE.exists() else None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is about the gateway alone meets the second engine in the long run only."""
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("any_engine") is not None:
            on = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
            if on == "embedded":
                item.add_marker(pytest.mark.long)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration beside two model files, a.gguf and b.gguf."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()

    def write_config(text: str) -> Path:
        file = tmp_path / "config.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write_config


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, fetched as the demo fetches it."""
    return fetch_demo_model(on_progress=lambda done, total: None)


@pytest.fixture(scope="session")
def native_engine() -> Path | None:
    """A native llama-server, or None on a machine without one."""
    return _native_engine()


def _both(param: str) -> str:
    if param == "embedded":
        return "embedded"
    native = _native_engine()
    if native is None and param == "native":
        pytest.skip("no native llama-server on this machine; deploy/native-engine-debian.sh installs one")
    return "embedded" if native is None else str(native)


@pytest.fixture(scope="session")
def promtool() -> str:
    """The tool of Debian's package prometheus; the server is in the same package."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool on this machine; apt-get install prometheus")
    return found


@pytest.fixture(scope="session", params=["embedded", "native"])
def each_engine(request: pytest.FixtureRequest) -> str:
    """The value of ``engine.binary``, for both engines: for what is about the engines themselves."""
    return _both(request.param)


@pytest.fixture(scope="session", params=["best", pytest.param("embedded", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> str:
    """The native engine where there is one; the embedded one too among the slow tests."""
    return _both(request.param)


@pytest.fixture(scope="session")
def one_engine(engine: str) -> str:
    """The same, as long tests call it."""
    return engine


@pytest.fixture(scope="session")
def gateway(engine: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with one model of two slots, for tests that leave it as they found it."""
    config = {
        "engine": {"binary": engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {
            MODEL_ID: {
                "path": str(demo_model),
                "aliases": ["gpt-4o-mini"],
                "context": CONTEXT_TOKENS,
                "parallel": 2,
                "max_tokens": 64,
            }
        },
    }
    with running_gateway(config, tmp_path_factory.mktemp("gateway")) as running:
        yield running
