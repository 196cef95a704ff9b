"""What strangers send never makes a new series."""

from __future__ import annotations

import asyncio
import random
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.main import create_app
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process

pytestmark = pytest.mark.any_engine


async def ask(app: Any, *, model: str, key: str, **fields: Any) -> int:
    """One request without a socket; the status."""
    body = orjson.dumps({"model": model, "messages": [{"role": "user", "content": "x" * 9000}]} | fields)
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0

    async def receive() -> dict[str, Any]:
        if not messages:
            # The client stays.
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + key.encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    await app(scope, receive, send)
    return status


def series(running: InProcess) -> int:
    return sum(not line.startswith(b"#") for line in running.gateway.metrics.expose().splitlines())


@pytest.mark.parametrize("requests", [1000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_random_users_and_model_names_leave_the_number_of_series_unchanged(
    engine: str, demo_model: Path, tmp_path: Path, requests: int
) -> None:
    dice = random.Random(8)
    async with gateway_in_process(engine, demo_model, tmp_path, context=256) as running:
        app = create_app(running.gateway)

        async def one(number: int) -> int:
            name = f"{dice.getrandbits(64):x}"
            # Every tenth is for the real model, and too long for it.
            model = MODEL_ID if number % 10 == 0 else f"model-{name}"
            return await ask(app, model=model, key=name, user=name, max_tokens=8)

        statuses = {await one(number) for number in range(20)}
        before = series(running)
        for number in range(requests):
            statuses.add(await one(number))
        assert series(running) == before
        assert statuses == {400, 404}
        counted = running.gateway.metrics.registry.get_sample_value
        assert (counted("llama_gateway_rejected_total", {"reason": "model_not_found"}) or 0) >= 0.9 * requests
