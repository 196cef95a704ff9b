"""Why an engine ended: every cause is produced, named to operator and client, and tried again only where that helps."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.backends.liveness import Patience
from app.engine.binary import EngineBinary
from app.engine.report import Cause
from app.errors import ModelFailed
from app.supervisor.restarts import RestartPolicy, RestartRules
from tests.fleet import Fleet, fake_engine_binary, fleet_of

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


def quick() -> RestartPolicy:
    return RestartPolicy(RestartRules(first_delay=0.01, longest_delay=0.02))


def dying(fake: EngineBinary, folder: Path, *, says: str = "", then: str = "exit 1") -> EngineBinary:
    """An engine that answers probes, and ends at once when it is to serve."""
    program = folder / "llama-server"
    death = f'printf "%s\\n" {shlex.quote(says)} >&2; {then}'
    program.write_text(
        # A plan is confirmed by an engine that is called probe; that one lives.
        f'#!/bin/sh\ncase "$*" in *"--alias probe"*) ;; *--alias*) {death};; esac\nexec {fake.path} "$@"\n'
    )
    program.chmod(0o755)
    return replace(fake, command=(str(program),), path=program)


async def failure_of(fleet: Fleet) -> tuple[Cause | None, str]:
    """The cause that the operator sees, and what a client is told."""
    with pytest.raises(ModelFailed) as failed:
        await fleet.supervisor.ready(fleet.model("a"))
    failure = fleet.supervisor.status(fleet.model("a")).failure
    assert failure is not None
    return failure.cause, failed.value.message


_AT_START: dict[str, tuple[str, str, Cause, str]] = {
    "device memory": (
        "0.01.1 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9.00 MiB on device 0: cudaMalloc failed: "
        "out of memory",
        "exit 1",
        Cause.OUT_OF_DEVICE_MEMORY,
        "The device ran out of memory",
    ),
    "host memory": ("terminate called after throwing: std::bad_alloc", "exit 1", Cause.KILLED_FOR_MEMORY, "of RAM"),
    "another CPU": ("loading model", "kill -ILL $$", Cause.WRONG_CPU, "built for another CPU"),
    "another CPU, through a shell": ("loading model", "exit 132", Cause.WRONG_CPU, "built for another CPU"),
    "library": (
        "llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared object file",
        "exit 127",
        Cause.MISSING_LIBRARY,
        "lacks a shared library",
    ),
    "socket": (
        "srv start: couldn't bind HTTP server socket, hostname: x, port: 0",
        "exit 1",
        Cause.ADDRESS_IN_USE,
        "could not listen",
    ),
    "flag": ("error: invalid argument: --flash", "exit 1", Cause.BAD_FLAG, "refused its command line"),
    "file": ("llama_model_load: error loading model: invalid magic", "exit 1", Cause.BAD_FILE, "the model file"),
    "crash": ("thinking", "kill -SEGV $$", Cause.CRASH, "crashed"),
    "unexplained": ("", "exit 0", Cause.CRASH, "crashed"),
}


@pytest.mark.parametrize(("says", "then", "cause", "public"), _AT_START.values(), ids=_AT_START)
async def test_a_failed_start_is_named(
    fake: EngineBinary, demo_model: Path, tmp_path: Path, says: str, then: str, cause: Cause, public: str
) -> None:
    engine = dying(fake, tmp_path, says=says, then=f"echo x >>{tmp_path}/tries; {then}")
    async with fleet_of(engine, demo_model, {"a": {}}, new_policy=quick) as fleet:
        found, told = await failure_of(fleet)
        assert found is cause
        assert public in told
        assert str(tmp_path) not in told
        tries = len((tmp_path / "tries").read_text().splitlines())
        assert tries == (1 if cause.permanent else 3)


async def test_a_program_that_is_gone(fake: EngineBinary, demo_model: Path, tmp_path: Path) -> None:
    engine = dying(fake, tmp_path, then=f"rm {tmp_path}/llama-server; exit 1")
    async with fleet_of(engine, demo_model, {"a": {}}, new_policy=quick) as fleet:
        with pytest.raises(ModelFailed, match="cannot be started"):
            await fleet.supervisor.ready(fleet.model("a"))


async def test_a_load_that_hangs_is_ended(fake: EngineBinary, demo_model: Path, tmp_path: Path) -> None:
    engine = dying(fake, tmp_path, says="loading model", then=f"echo $$ >{tmp_path}/pid; kill -STOP $$; sleep 60")
    patience = Patience(stall_seconds=0.4)
    once = RestartRules(failed_loads=1)
    options: dict[str, Any] = {"new_policy": lambda: RestartPolicy(once), "patience": patience}
    async with fleet_of(engine, demo_model, {"a": {}}, **options) as fleet:
        found, told = await failure_of(fleet)
        assert found is Cause.HANG
        assert "no progress" in told
        pid = int((tmp_path / "pid").read_text())
        with pytest.raises(ProcessLookupError):
            # Nothing is left that a SIGCONT could wake.
            os.kill(pid, signal.SIGCONT)


async def test_asked_to_stop_is_no_failure(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        fleet.supervisor.unload(fleet.model("a"))
        engine_exit = await backend.wait_exit()
        assert engine_exit.cause is Cause.ASKED
        assert fleet.supervisor.status(fleet.model("a")).deaths == 0


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 40 MiB."""
    own = next(
        (
            line.split(":", 2)[2].strip().lstrip("/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if "memory" in line.split(":")[1].split(",")
        ),
        None,
    )
    group = MEMORY_GROUPS / (own or "") / f"lg-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(40 << 20))
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    yield group
    group.rmdir()


async def test_killed_by_the_kernel_for_memory(
    fake: EngineBinary, demo_model: Path, tmp_path: Path, small_group: Path
) -> None:
    hungry = "a = bytearray()\nwhile True: a += bytes(1 << 20)"
    then = f"echo $$ >{small_group}/cgroup.procs; exec {sys.executable} -c {shlex.quote(hungry)}"
    async with fleet_of(dying(fake, tmp_path, then=then), demo_model, {"a": {}}, new_policy=quick) as fleet:
        found, told = await failure_of(fleet)
        assert found is Cause.KILLED_FOR_MEMORY
        assert "ran out of RAM" in told


async def test_a_kill_that_was_not_the_kernels_is_a_crash(fake: EngineBinary, demo_model: Path) -> None:
    async with fleet_of(fake, demo_model, {"a": {}}, new_policy=quick) as fleet:
        backend = await fleet.supervisor.ready(fleet.model("a"))
        assert backend.process.pid is not None
        os.kill(backend.process.pid, signal.SIGKILL)
        assert (await backend.wait_exit()).cause is Cause.CRASH
        await asyncio.sleep(0)
