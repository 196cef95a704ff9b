"""A supervisor over fake engines: what each model's engine does is a file that a test may change between its lives."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import ModelCatalog, ModelConfig, Settings
from app.engine.binary import EngineBinary, find_engine
from app.metrics import Metrics
from app.supervisor import Supervisor

_FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
# Enough for one of the demo models with a small context, not for two.
ONE_MODEL = "900MiB"

_PROGRAM = """#!{python}
import os, pathlib, runpy, sys
words = sys.argv
# A plan is confirmed by an engine of its own that is called so and loads nothing.
if "--alias" in words and "probe" not in words and "FAKE_SWITCHES" in os.environ:
    folder = pathlib.Path(os.environ["FAKE_SWITCHES"])
    alias = words[words.index("--alias") + 1]
    file = folder / (alias + ".json")
    os.environ["FAKE_ENGINE"] = file.read_text() if file.exists() else "{{}}"
    with (folder / "starts").open("a") as starts:
        starts.write(alias + " " + str(os.getpid()) + "\\n")
sys.path.insert(0, {folder!r})
sys.argv[0] = {program!r}
runpy.run_path({program!r}, run_name="__main__")
"""


def fake_binary(folder: Path) -> Path:
    """The fake engine as a program that reads its model's switches at each start."""
    path = folder / "llama-server"
    text = _PROGRAM.format(python=sys.executable, folder=str(_FAKE_ENGINE.parent), program=str(_FAKE_ENGINE))
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@dataclass(frozen=True)
class Fleet:
    """``folder`` holds the switches; ``starts`` are the engines that were started, in order."""

    supervisor: Supervisor
    catalog: ModelCatalog
    metrics: Metrics
    folder: Path

    def model(self, name: str) -> ModelConfig:
        return self.catalog.resolve(name)

    def state(self, name: str) -> str:
        return self.supervisor.status(self.model(name)).state.value

    def switch(self, name: str, **switches: Any) -> None:
        """What the next engine of this model does."""
        (self.folder / f"{name}.json").write_text(json.dumps(switches))

    def starts(self) -> list[str]:
        file = self.folder / "starts"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def pids(self) -> list[int]:
        """Of every engine that was ever started."""
        file = self.folder / "starts"
        return [int(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []

    def loop_time(self) -> float:
        """The clock of the loops, readable from any thread."""
        return time.monotonic()

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"llama_gateway_{metric}", labels) or 0.0


def settings_for(model: Path, state: Path, models: Mapping[str, Mapping[str, Any]], **sections: Any) -> Settings:
    """Settings with these models, all of the same file, and no memory kept back."""
    memory = {"ram_reserve": 0, "min_residency": "0s", "max_swap_wait": "10s"} | sections.pop("memory", {})
    entries = {name: {"path": model, "context": 512} | dict(fields) for name, fields in models.items()}
    return Settings.model_validate({"memory": memory, "models": entries, "state_dir": state, **sections})


@asynccontextmanager
async def fleet_of(
    engine: EngineBinary, model: Path, models: Mapping[str, Mapping[str, Any]], *, memory: Any = None, **options: Any
) -> AsyncIterator[Fleet]:
    """A supervisor whose engines are all gone when the block ends."""
    # pytest's own folders make socket paths longer than the 108 bytes that the system allows.
    folder = Path(tempfile.mkdtemp(prefix="lg-"))
    settings = settings_for(model, folder, models, memory=memory or {}, **options.pop("sections", {}))
    catalog, metrics = ModelCatalog(settings), Metrics()
    supervisor = Supervisor(
        catalog,
        engine=engine,
        memory=settings.memory,
        run_dir=folder,
        metrics=metrics,
        environment={**os.environ, "FAKE_SWITCHES": str(folder)},
        **options,
    )
    try:
        yield Fleet(supervisor, catalog, metrics, folder)
    finally:
        await supervisor.close()
        shutil.rmtree(folder, ignore_errors=True)


def fake_engine_binary() -> EngineBinary:
    """The fake engine, probed as any other; its program stays until the interpreter ends."""
    return find_engine(str(fake_binary(Path(tempfile.mkdtemp(prefix="lg-engine-")))))
