"""A real engine that is stopped four fifths of the time is found slow, told, and forgiven when it runs again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.events import EventKind
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process

pytestmark = pytest.mark.any_engine

_RUNS_SECONDS, _RESTS_SECONDS = 0.01, 0.04
# Long enough that no answer fits between two stops, on a fast machine either.
_ANSWER_TOKENS = 32
# Who shares this machine may slow the engine down too.
_MOST_ANSWERS = 40


@contextmanager
def choked(group: int) -> Iterator[None]:
    """Stop and continue the process group in turn."""
    over = threading.Event()

    def choke() -> None:
        while not over.wait(_RUNS_SECONDS):
            os.killpg(group, signal.SIGSTOP)
            over.wait(_RESTS_SECONDS)
            os.killpg(group, signal.SIGCONT)

    choker = threading.Thread(target=choke)
    choker.start()
    try:
        yield
    finally:
        over.set()
        choker.join(10)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)


async def ask(running: InProcess, *, times: int) -> None:
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Count."}], "max_tokens": _ANSWER_TOKENS}
    async with httpx.AsyncClient(timeout=300) as client:
        for _ in range(times):
            url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
            (await client.post(url, json=body | {"ignore_eos": True})).raise_for_status()


async def reasons(running: InProcess) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=300) as client:
        document = (await client.get(f"http://127.0.0.1:{running.port}/admin/models/{MODEL_ID}")).json()
    slow: dict[str, Any] = document["slow"]
    return slow


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_an_engine_that_is_stopped_most_of_the_time_is_found(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    async with gateway_in_process(one_engine, demo_model, tmp_path, context=256) as running:
        gauge = running.gateway.metrics.registry.get_sample_value
        labels = {"model": MODEL_ID, "cause": "decode_speed"}
        await ask(running, times=14)
        assert await reasons(running) == {}
        with choked(running.backend.process.pid):
            await ask(running, times=5)
        assert "of its own usual speed" in (await reasons(running))["decode_speed"]
        assert gauge("llama_gateway_model_slow", labels) == 1
        for _ in range(_MOST_ANSWERS):
            await ask(running, times=1)
            if not await reasons(running):
                break
        assert await reasons(running) == {}
        assert gauge("llama_gateway_model_slow", labels) == 0
        told = [one for one in running.gateway.events.latest(50) if one.kind is EventKind.SLOW_DOWN]
        assert [one.cause for one in told] == ["decode_speed"] * 2
