"""What the slots hold outlives their engine, when that is wanted: verified, bounded, private, never stale."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.backends.conversations import Conversations, folder_of, forget_others
from app.engine.binary import EngineBinary
from app.errors import RequestError
from app.gguf import read_header
from app.hardware import Machine
from app.offload import Wish, plan_offload
from tests.conftest import MODEL_ID
from tests.fleet import fake_engine_binary
from tests.gateway import GatewayProcess, running_gateway, wait_until

LONG = "Tell me about the sea, its tides and its many fish, and about the ships that cross it. " * 8


# The whole way, on a real engine


def ask(client: httpx.Client, text: str = LONG) -> tuple[int, int]:
    """Prompt tokens and those of them that a slot already held."""
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def config(engine: str, model: Path, **fields: Any) -> dict[str, Any]:
    entry = {"path": str(model), "context": 512, "parallel": 2, "keep_conversations": "64MiB"} | fields
    return {"engine": {"binary": engine}, "memory": {"ram_reserve": "256MiB"}, "models": {MODEL_ID: entry}}


def saved_files(gateway: GatewayProcess) -> list[Path]:
    return sorted(file for file in (gateway.state_dir / "conversations").rglob("*") if file.is_file())


def unload(client: httpx.Client) -> None:
    client.post(f"/admin/models/{MODEL_ID}/unload")
    stopped = lambda: client.get(f"/admin/models/{MODEL_ID}").json()["state"] == "stopped"  # noqa: E731
    wait_until(stopped, seconds=30, what="the model is unloaded")


@pytest.mark.slow
def test_a_conversation_survives_unloading_and_a_restart_of_the_gateway(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    with running_gateway(config(one_engine, demo_model), tmp_path) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            prompt, cached = ask(client)
            assert cached == 0
            unload(client)
            files = saved_files(gateway)
            assert [file.name for file in files] == ["manifest.json", "slot-0.bin"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
            assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
            # All of it but the one token that must be evaluated to get an answer.
            assert ask(client) == (prompt, prompt - 1)
            # They are read once: what is on disk is never older than what an engine holds.
            assert saved_files(gateway) == []
        assert gateway.stop() == 0
        assert len(saved_files(gateway)) == 2
    with running_gateway(config(one_engine, demo_model), tmp_path) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            assert ask(client) == (prompt, prompt - 1)
        assert gateway.stop() == 0
    # Another cache is another layout: what was saved for the old one is removed unread.
    with running_gateway(config(one_engine, demo_model, kv_cache="q8_0"), tmp_path) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            assert ask(client) == (prompt, 0)
        assert saved_files(gateway) == []


# By itself


class ScriptedSlots:
    """An engine's routes for slots, with what it was asked."""

    def __init__(self, folder: Path, *, tokens: tuple[int, ...], bytes_each: int = 1000) -> None:
        self.folder, self.tokens, self.bytes_each = folder, tokens, bytes_each
        self.asked: list[str] = []
        self.busy: set[int] = set()
        self.restores = 10

    async def __call__(self, path: str, body: Mapping[str, Any] | None) -> Any:
        self.asked.append(path)
        if path == "/slots":
            return [
                {"id": number, "is_processing": number in self.busy, "n_prompt_tokens": tokens}
                for number, tokens in enumerate(self.tokens)
            ]
        number = int(path.split("/")[2].partition("?")[0])
        if path.endswith("save"):
            assert body is not None
            (self.folder / body["filename"]).write_bytes(b"x" * self.bytes_each)
            return {"n_saved": self.tokens[number]}
        if path.endswith("restore") and self.restores < 0:
            raise RequestError("Unable to restore slot")
        return {"n_restored": self.restores}


Make = Callable[..., Conversations]


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


@pytest.fixture
def make(demo_model: Path, fake: EngineBinary, tmp_path: Path) -> Make:
    """Of a copy of the model, with 23,040 bytes of cache per token."""
    file = Path(shutil.copy(demo_model, tmp_path / "model.gguf"))

    def conversations(
        *, context: int = 512, extra_args: tuple[str, ...] = (), limit_bytes: int = 1 << 30
    ) -> Conversations:
        machine = Machine((), 64 << 30, 32 << 30, 4)
        plan = plan_offload(read_header(file), machine, Wish(context=context))
        made = Conversations(tmp_path / "kept", plan, fake, extra_args=extra_args, limit_bytes=limit_bytes)
        made.open()
        return made

    return conversations


async def test_what_is_saved_is_given_back_once(make: Make, tmp_path: Path) -> None:
    slots = ScriptedSlots(tmp_path / "kept", tokens=(10, 0, 10))
    slots.busy = {2}
    await make().save(slots)
    assert slots.asked == ["/slots", "/slots/0?action=save", "/slots/1?action=save"]
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["manifest.json", "slot-0.bin"]
    assert await make().restore(slots) == 10
    assert slots.asked[3:] == ["/slots/0?action=restore"]
    assert list((tmp_path / "kept").iterdir()) == []
    assert await make().restore(slots) == 0
    assert len(slots.asked) == 4


@pytest.mark.parametrize("number", [9, 11, 0])
async def test_half_a_conversation_is_erased(make: Make, tmp_path: Path, number: int) -> None:
    slots = ScriptedSlots(tmp_path / "kept", tokens=(10,))
    await make().save(slots)
    slots.restores = number
    assert await make().restore(slots) == 0
    assert slots.asked[-1] == "/slots/0?action=erase"


async def test_an_engine_that_refuses_starts_all_the_same(make: Make, tmp_path: Path) -> None:
    slots = ScriptedSlots(tmp_path / "kept", tokens=(10,))
    await make().save(slots)
    slots.restores = -1
    assert await make().restore(slots) == 0
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize("change", ["file", "context", "flags", "damage"])
async def test_what_belongs_to_another_model_is_removed_unread(make: Make, tmp_path: Path, change: str) -> None:
    slots = ScriptedSlots(tmp_path / "kept", tokens=(10,))
    await make().save(slots)
    if change == "file":
        os.utime(tmp_path / "model.gguf", ns=(0, 0))
    elif change == "damage":
        (tmp_path / "kept" / "manifest.json").write_bytes(b"{")
    fields = {"context": {"context": 1024}, "flags": {"extra_args": ("--cache-reuse", "64")}}.get(change, {})
    assert await make(**fields).restore(slots) == 0
    assert slots.asked[2:] == []
    assert list((tmp_path / "kept").iterdir()) == []


async def test_the_disk_is_bounded(make: Make, tmp_path: Path) -> None:
    # Ten tokens take 230,400 bytes at most: the third would be too much by what the first two took.
    slots = ScriptedSlots(tmp_path / "kept", tokens=(10, 10, 10), bytes_each=200_000)
    await make(limit_bytes=500_000).save(slots)
    assert slots.asked == ["/slots", "/slots/0?action=save", "/slots/1?action=save"]
    assert sum(file.stat().st_size for file in (tmp_path / "kept").glob("slot-*")) == 400_000


def test_models_that_are_gone_leave_nothing(tmp_path: Path) -> None:
    for name in ("kept/with a slash", "gone"):
        folder_of(tmp_path, name).mkdir()
    forget_others(tmp_path, ["kept/with a slash"])
    assert list(tmp_path.iterdir()) == [folder_of(tmp_path, "kept/with a slash")]
    forget_others(tmp_path / "nothing was ever saved", [])
