"""An engine's life from spawn to reap, on both real engines and on small programs that behave badly."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvloop

from app.engine.binary import EngineBinary, find_engine
from app.engine.endpoint import Endpoint
from app.engine.environment import child_environment
from app.engine.output import EngineOutput
from app.engine.process import EngineDied, EngineProcess, LaunchSpec, State
from app.engine.report import Cause
from app.engine.state import TRANSITIONS

KEY = "a-key-of-the-test"
OOM_KILLS_ARE_COUNTED = "oom_kill " in Path("/proc/vmstat").read_text(encoding="ascii")

FAKE = """
import os, signal, socket, subprocess, sys, time
path, switches = sys.argv[1], sys.argv[2:]
if "ignore_sigterm" in switches:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "long_line" in switches:
    sys.stderr.write("x" * (10 << 20) + "\\n")
    sys.stderr.write("after the long line\\n")
if "grandchild" in switches:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    print("grandchild", child.pid)
sys.stdout.flush()
if "deaf" in switches:
    time.sleep(300)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
while True:
    client, _ = server.accept()
    client.recv(4096)
    client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{}")
    client.close()
"""

PARENT = """
import asyncio, json, sys
from pathlib import Path
from app.engine.endpoint import Endpoint
from app.engine.process import EngineProcess, LaunchSpec

async def main():
    wish = json.loads(sys.argv[1])
    endpoint = Endpoint(socket=Path(wish["socket"]))
    engine = EngineProcess(LaunchSpec("orphan", tuple(wish["argv"]), wish["environment"], endpoint, "key"))
    engine.start()
    await engine.wait_ready()
    print(engine.pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    # pytest's own folders make socket paths longer than the 108 bytes that the system allows.
    with tempfile.TemporaryDirectory(prefix="lg-") as name:
        yield Path(name)


@pytest.fixture(params=["embedded", "native"])
def engine(request: pytest.FixtureRequest) -> EngineBinary:
    if request.param == "embedded":
        return find_engine("embedded")
    native: Path | None = request.getfixturevalue("native_engine")
    if native is None:
        pytest.skip("no native llama-server here")
    return find_engine(str(native))


def real_spec(engine: EngineBinary, model: Path, folder: Path, *extra: str) -> LaunchSpec:
    key_file = folder / "key"
    key_file.write_text(KEY + "\n", encoding="ascii")
    endpoint = Endpoint(socket=folder / "engine.sock")
    flags = (
        "--model", str(model), "--alias", "demo", "--host", str(endpoint.socket), "--api-key-file", str(key_file),
        "-c", "1024", "-np", "2", "--no-kv-unified", "--fit", "off", "--device", "none", "-ngl", "0", "-t", "1",
        "-b", "256", "-ub", "256", "-cram", "0", "-lv", "4", "--no-ui", "--no-warmup", *extra,
    )  # fmt: skip
    return LaunchSpec("demo", (*engine.command, *flags), child_environment(os.environ), endpoint, KEY)


def fake_spec(folder: Path, *switches: str) -> LaunchSpec:
    script = folder / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    path = folder / "fake.sock"
    argv = (sys.executable, "-I", str(script), str(path), *switches)
    return LaunchSpec("fake", argv, child_environment(os.environ), Endpoint(socket=path), KEY, grace_seconds=1)


def alive(pid: int) -> bool:
    """A zombie is dead: it holds nothing but its exit code."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def state_of(process: EngineProcess) -> State:
    """The state now; a property looks constant to a type checker."""
    return process.state


def gone_within(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def client_of(spec: LaunchSpec) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(spec.endpoint.socket))
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers, timeout=30)


async def test_starts_measures_itself_and_stops_twice(engine: EngineBinary, demo_model: Path, folder: Path) -> None:
    spec = real_spec(engine, demo_model, folder)
    process = EngineProcess(spec)
    for _ in range(2):
        process.start()
        assert state_of(process) is State.STARTING
        await process.wait_ready()
        assert state_of(process) is State.READY
        pid = process.pid
        assert pid is not None
        assert alive(pid)
        async with client_of(spec) as client:
            models = (await client.get("/v1/models")).json()
            assert (await client.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 401
        assert models["data"][0]["id"] == "demo"
        measured = process.measured
        assert (measured.slots, measured.context_per_slot) == (2, 512)
        assert measured.device_bytes() == {}
        # 30 layers, K and V of 192 elements in f16, 2 slots of 512 cells.
        assert {b.size_bytes for b in measured.buffers if b.kind == "kv"} == {2 * 512 * 30 * 2 * 192 * 2}
        assert process.resident_bytes() > 50 << 20
        end = await process.stop()
        assert (end.cause, end.phase, end.returncode) == (Cause.ASKED, State.READY, 0)
        assert process.state is State.STOPPED
        assert not alive(pid)
        assert process.pid is None
        assert not (folder / "engine.sock").exists()
    assert await process.stop() == end


async def test_stops_within_two_seconds_with_an_open_stream(
    engine: EngineBinary, demo_model: Path, folder: Path
) -> None:
    spec = real_spec(engine, demo_model, folder)
    process = EngineProcess(spec)
    process.start()
    await process.wait_ready()
    body = {"prompt": "Once", "max_tokens": 500, "stream": True, "ignore_eos": True}
    async with client_of(spec) as client, client.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.aiter_bytes()
        await anext(chunks)
        begun = time.monotonic()
        end = await process.stop()
        assert time.monotonic() - begun < 2
        assert end.cause is Cause.ASKED
        assert end.returncode != -signal.SIGKILL
        with suppress(httpx.HTTPError):
            # What was on its way may still come; then the stream is over, well or not.
            assert len([chunk async for chunk in chunks]) < 500


async def test_a_bad_file_and_a_bad_flag_are_named(engine: EngineBinary, folder: Path) -> None:
    page = folder / "page.gguf"
    page.write_text("<html>not found</html>", encoding="ascii")
    process = EngineProcess(real_spec(engine, page, folder))
    process.start()
    with pytest.raises(EngineDied) as died:
        await process.wait_ready()
    end = died.value.exit
    assert (end.cause, end.phase, process.state) == (Cause.BAD_FILE, State.STARTING, State.FAILED)
    assert end.cause.permanent
    assert "invalid magic" in end.sentence
    assert str(folder) not in end.public

    process = EngineProcess(real_spec(engine, page, folder, "--no-such-flag"))
    process.start()
    end = await process.wait_exit()
    assert end.cause is Cause.BAD_FLAG
    assert "--no-such-flag" in end.sentence
    assert end.returncode == 1


async def test_a_taken_port_is_named(engine: EngineBinary, demo_model: Path, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = real_spec(engine, demo_model, folder, "--host", "127.0.0.1", "--port", str(port))
        process = EngineProcess(replace(spec, endpoint=Endpoint(port=port)))
        process.start()
        end = await process.wait_exit()
    assert end.cause is Cause.ADDRESS_IN_USE
    assert not end.cause.permanent


async def test_serves_on_a_port_too(engine: EngineBinary, demo_model: Path, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = real_spec(engine, demo_model, folder, "--host", "127.0.0.1", "--port", str(port))
    process = EngineProcess(replace(spec, endpoint=Endpoint(port=port)))
    process.start()
    await process.wait_ready()
    assert (await process.stop()).cause is Cause.ASKED


async def test_a_killed_engine_is_a_crash_not_a_memory_problem(
    engine: EngineBinary, demo_model: Path, folder: Path
) -> None:
    process = EngineProcess(real_spec(engine, demo_model, folder))
    process.start()
    await process.wait_ready()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    end = await process.wait_exit()
    assert (end.returncode, end.phase, process.state) == (-signal.SIGKILL, State.READY, State.FAILED)
    # Where the kernel does not count its kills for memory, SIGKILL is taken for one.
    assert end.cause is (Cause.CRASH if OOM_KILLS_ARE_COUNTED else Cause.KILLED_FOR_MEMORY)
    process.start()
    await process.wait_ready()
    await process.stop()


def test_a_killed_gateway_takes_its_engine_along(engine: EngineBinary, demo_model: Path, folder: Path) -> None:
    spec = real_spec(engine, demo_model, folder)
    wish = {"argv": spec.argv, "environment": dict(spec.environment), "socket": str(spec.endpoint.socket)}
    with subprocess.Popen([sys.executable, "-c", PARENT, json.dumps(wish)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        gone = gone_within(pid, 1)
        if not gone:
            os.kill(pid, signal.SIGKILL)
        assert gone
        assert not alive(pid)


async def test_a_stop_during_the_load_ends_it(engine: EngineBinary, demo_model: Path, folder: Path) -> None:
    process = EngineProcess(real_spec(engine, demo_model, folder))
    process.start()
    waiter = asyncio.create_task(process.wait_ready())
    while process.pid is None:
        await asyncio.sleep(0)
    pid = process.pid
    end = await process.stop()
    assert (end.cause, end.phase, process.state) == (Cause.ASKED, State.STARTING, State.STOPPED)
    assert not alive(pid)
    with pytest.raises(EngineDied):
        await waiter


async def test_a_child_that_ignores_sigterm_is_killed(folder: Path) -> None:
    process = EngineProcess(fake_spec(folder, "ignore_sigterm"))
    process.start()
    await process.wait_ready()
    end = await process.stop()
    assert (end.cause, end.returncode) == (Cause.ASKED, -signal.SIGKILL)


async def test_a_grandchild_in_its_own_session_goes_too(folder: Path) -> None:
    process = EngineProcess(fake_spec(folder, "grandchild"))
    process.start()
    await process.wait_ready()
    grandchild = int(next(line for line in process.log_tail() if line.startswith("grandchild")).split()[1])
    assert alive(grandchild)
    begun = time.monotonic()
    await process.stop()
    # It holds the pipe until it is dead: the end of the process counts, not the end of its pipe.
    assert time.monotonic() - begun < 1
    assert gone_within(grandchild, 1)


async def test_ten_mebibytes_in_one_line_do_no_harm(folder: Path) -> None:
    process = EngineProcess(fake_spec(folder, "long_line"))
    process.start()
    await process.wait_ready()
    assert process.log_tail(2)[1] == "after the long line"
    assert len(process.log_tail(2)[0]) == 4096
    await process.stop()


async def test_a_load_without_progress_is_a_hang(folder: Path) -> None:
    process = EngineProcess(replace(fake_spec(folder, "deaf"), stall_seconds=0.5))
    process.start()
    with pytest.raises(EngineDied) as died:
        await process.wait_ready()
    assert (died.value.exit.cause, process.state) == (Cause.HANG, State.FAILED)


async def test_a_stale_socket_is_no_obstacle(folder: Path) -> None:
    spec = fake_spec(folder)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(spec.endpoint.socket))
    process = EngineProcess(spec)
    process.start()
    await process.wait_ready()
    await process.stop()


async def test_a_missing_program_is_named(folder: Path) -> None:
    process = EngineProcess(replace(fake_spec(folder), argv=(str(folder / "no-such-program"),)))
    process.start()
    end = await process.wait_exit()
    assert end.cause is Cause.CANNOT_EXECUTE
    assert "no-such-program" in end.sentence
    assert str(folder) not in end.public


async def test_cancelling_who_waits_does_not_touch_the_engine(folder: Path) -> None:
    process = EngineProcess(fake_spec(folder))
    process.start()
    waiters = [asyncio.create_task(process.wait_ready()), asyncio.create_task(process.wait_exit())]
    await asyncio.sleep(0)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    await process.wait_ready()
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    assert (await process.wait_exit()).cause is Cause.ASKED


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_is_torn_down_leaves_no_process(run: object, folder: Path) -> None:
    pids: list[int] = []

    async def abandon() -> None:
        process = EngineProcess(fake_spec(folder, "ignore_sigterm"))
        process.start()
        await process.wait_ready()
        assert process.pid is not None
        pids.append(process.pid)

    assert callable(run)
    run(abandon())
    assert not alive(pids[0])


def test_works_under_uvloop(demo_model: Path, folder: Path) -> None:
    async def life() -> None:
        process = EngineProcess(real_spec(find_engine("embedded"), demo_model, folder))
        process.start()
        await process.wait_ready()
        assert process.measured.slots == 2
        assert (await process.stop()).returncode == 0

    uvloop.run(life())


async def test_twenty_lives_leave_no_descriptor_and_no_task(folder: Path) -> None:
    process = EngineProcess(fake_spec(folder))
    tasks, descriptors = set(), set()
    for _ in range(20):
        process.start()
        await process.wait_ready()
        await process.stop()
        await asyncio.sleep(0)
        tasks.add(len(asyncio.all_tasks()))
        descriptors.add(len(os.listdir("/proc/self/fd")))
    assert len(tasks) == 1
    # The event loop opens a few of its own with the first life.
    assert max(descriptors) - min(descriptors) <= 2


async def test_a_second_start_is_refused(folder: Path) -> None:
    process = EngineProcess(fake_spec(folder))
    assert (await process.stop()).cause is Cause.ASKED
    process.start()
    with pytest.raises(AssertionError):
        process.start()
    await process.stop()


def test_every_state_can_be_left_and_reached() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set().union(*TRANSITIONS.values()) == set(State)


def test_lines_are_joined_over_chunks_and_bounded() -> None:
    output = EngineOutput()
    assert output.feed(b"one\ntw") == ["one"]
    assert output.feed("o \N{SNOWMAN}\r\n".encode()[:5]) == []
    assert output.feed("o \N{SNOWMAN}\r\n".encode()[5:]) == ["two \N{SNOWMAN}"]
    assert output.feed(b"last") == []
    assert output.close() == ["last"]
    for _ in range(1000):
        output.feed(textwrap.dedent("line\n").encode())
    assert len(output.tail(1000)) == 400
    assert output.tail(0) == []
