"""One line per request with its figures and none of its words; words only in a folder, on request, up to a size."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.backlog import Backlog
from app.captures import Capture, CaptureFolder
from app.request_log import RequestLog
from app.request_record import RequestRecord
from tests.conftest import MODEL_ID
from tests.inprocess import InProcess, gateway_in_process

pytestmark = pytest.mark.any_engine

CANARY = "xylophone"
HELLO = {"model": MODEL_ID, "messages": [{"role": "user", "content": f"Say {CANARY}."}], "max_tokens": 6}


def record(number: int = 0) -> RequestRecord:
    return RequestRecord(f"r{number}", "alice", "m", "chat", "ok", None, 1.0, 0.5)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# What is written down later


async def test_items_are_written_in_order_and_the_rest_at_the_end() -> None:
    batches: list[list[int]] = []
    backlog: Backlog[int] = Backlog("it", lambda batch: batches.append(list(batch)), most=10, on_lost=lambda n: None)
    running = asyncio.create_task(backlog.run())
    await asyncio.sleep(0)
    for number in range(5):
        backlog.put(number)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert batches == [[0, 1, 2, 3, 4]]


async def test_a_full_backlog_loses_the_newest_and_says_how_many() -> None:
    written: list[int] = []
    lost: list[int] = []
    backlog: Backlog[int] = Backlog("it", written.extend, most=2, on_lost=lost.append)
    for number in range(5):
        backlog.put(number)
    await backlog.flush()
    assert (written, sum(lost)) == ([0, 1], 3)


async def test_a_disk_that_is_full_is_reported_once_and_forgiven(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[int] = []
    written: list[int] = []
    is_full = True

    def write(batch: Sequence[int]) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        written.extend(batch)

    backlog: Backlog[int] = Backlog("the log", write, most=10, on_lost=lost.append)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            backlog.put(number)
            await backlog.flush()
    assert [one.message for one in caplog.records] == [
        "the log cannot be written ([Errno 28] No space left on device); what comes meanwhile is lost"
    ]
    is_full = False
    backlog.put(9)
    await backlog.flush()
    assert (written, sum(lost)) == ([9], 3)


async def test_a_log_that_was_rotated_away_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "requests.jsonl"
    log = RequestLog(file, on_lost=lambda count: pytest.fail("lost"))
    for number in range(2):
        log.observe(record(number))
        running = asyncio.create_task(log.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if number == 0:
            file.rename(tmp_path / "old")
    assert [line["id"] for line in lines(tmp_path / "old")] == ["r0"]
    assert [line["id"] for line in lines(file)] == ["r1"]
    assert file.stat().st_mode & 0o777 == 0o600


# The folder of bodies


async def keep(folder: CaptureFolder, *captures: Capture) -> None:
    for capture in captures:
        folder.put(capture)
    running = asyncio.create_task(folder.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def capture(name: str, *, size: int = 1000) -> Capture:
    return Capture(name, "/v1/chat/completions", 200, b"?" * size, b"!", is_cut=False)


def kept(folder: Path) -> list[str]:
    return [json.loads(path.read_text())["id"] for path in sorted(folder.glob("*.json"))]


async def test_the_folder_stays_below_its_limit_and_the_oldest_go_first(tmp_path: Path) -> None:
    folder = CaptureFolder(tmp_path / "bodies", limit_bytes=4000, on_lost=lambda count: None)
    (tmp_path / "bodies").mkdir()
    (tmp_path / "bodies" / "notes.txt").write_text("x" * 9000)
    await keep(folder, *(capture(f"r{number}") for number in range(5)))
    assert kept(tmp_path / "bodies") == ["r2", "r3", "r4"]
    await keep(folder, capture("huge", size=5000))
    assert kept(tmp_path / "bodies") == ["r2", "r3", "r4"]
    # The next run counts what this one has left.
    again = CaptureFolder(tmp_path / "bodies", limit_bytes=4000, on_lost=lambda count: None)
    await keep(again, capture("r5"))
    assert kept(tmp_path / "bodies") == ["r3", "r4", "r5"]
    assert (tmp_path / "bodies" / "notes.txt").exists()


async def test_a_request_id_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = CaptureFolder(tmp_path / "bodies", limit_bytes=1 << 20, on_lost=lambda count: None)
    await keep(folder, capture(".." * 70))
    assert len(kept(tmp_path / "bodies")) == 1
    assert beside(tmp_path) == ["bodies"]


def beside(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# The whole gateway


async def serve_some(running: InProcess) -> dict[str, Any]:
    """A plain answer, a stream, one that is refused, and one whose client leaves; the first one's usage."""
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60) as client:
        plain = await client.post(url, json=HELLO, headers={"x-request-id": "plain"})
        await client.post(url, json=HELLO | {"stream": True}, headers={"x-request-id": "stream"})
        await client.post(url, json=HELLO | {"max_tokens": 4096}, headers={"x-request-id": "refused"})
    leaver = await running.send(**HELLO | {"stream": True, "max_tokens": 200})
    await leaver.until(b"data: ")
    await leaver.until(b"}\n\n")
    await leaver.close()
    while running.backend and running.gateway.scheduler.in_flight(MODEL_ID):
        await asyncio.sleep(0.01)
    usage: dict[str, Any] = plain.json()["usage"]
    return usage


async def test_every_request_has_its_line_and_no_line_its_words(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    file, bodies = tmp_path / "requests.jsonl", tmp_path / "bodies"
    settings = {"request_log": {"file": str(file), "bodies": str(bodies)}}
    async with gateway_in_process(one_engine, demo_model, tmp_path, settings=settings, context=512) as running:
        usage = await serve_some(running)
    by_id = {line["id"]: line for line in lines(file)}
    assert CANARY not in file.read_text()
    plain, left = by_id["plain"], next(line for line in by_id.values() if line["outcome"] == "client_gone")
    assert (plain["key"], plain["model"], plain["endpoint"], plain["outcome"]) == ("anonymous", MODEL_ID, "chat", "ok")
    assert (plain["prompt_tokens"], plain["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert plain["prefill_ms"] > 0
    parts = [plain[f"{part}_ms"] for part in ("load", "queue", "prefill", "decode")]
    assert sum(parts) <= plain["total_ms"] + 1
    assert by_id["stream"]["cached_tokens"] > 0
    assert (by_id["refused"]["outcome"], by_id["refused"]["error"]) == ("rejected", "context_length_exceeded")
    assert by_id["refused"]["generated_tokens"] == 0
    assert (left["prompt_tokens"], left["error"]) == (usage["prompt_tokens"], None)
    assert 1 <= left["generated_tokens"] < 200
    words = {json.loads(path.read_text())["id"]: json.loads(path.read_text()) for path in bodies.glob("*.json")}
    assert CANARY in words["plain"]["request"]
    assert json.loads(words["plain"]["response"])["usage"] == usage
    assert words["stream"]["response"].endswith("data: [DONE]\n\n")
    assert words["stream"]["response"].count('"content":') >= usage["completion_tokens"]
    assert words["refused"]["status"] == 400
    assert len(words) == 4
