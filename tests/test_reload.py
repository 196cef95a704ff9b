"""A new configuration: only what differs is touched, nothing is lost, and one that cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.config import ModelCatalog
from app.reloading import FileWatch
from app.supervisor.changes import Changes, compare
from tests.fleet import Fleet, fake_binary, fake_engine_binary, fleet_of, settings_for
from tests.gateway import GatewayProcess, running_gateway, wait_until

BODY = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}


# What differs


def catalog(model: Path, folder: Path, models: dict[str, Any], **sections: Any) -> ModelCatalog:
    return ModelCatalog(settings_for(model, folder, models, **sections))


def difference(model: Path, folder: Path, old: dict[str, Any], new: dict[str, Any]) -> Changes:
    before = {each.id: each for each in catalog(model, folder, old)}
    return compare(before, catalog(model, folder, new))


_DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], Changes]] = {
    "nothing": ({"a": {}}, {"a": {}}, Changes()),
    "one more": ({"a": {}}, {"a": {}, "b": {}}, Changes(added=("b",))),
    "one less": ({"a": {}, "b": {}}, {"b": {}}, Changes(removed=("a",))),
    "context": ({"a": {}}, {"a": {"context": 256}}, Changes(restarted=("a",))),
    "slots": ({"a": {}}, {"a": {"parallel": 2}}, Changes(restarted=("a",))),
    "projector": ({"a": {}}, {"a": {"mmproj": "p.gguf"}}, Changes(restarted=("a",))),
    "flags": ({"a": {}}, {"a": {"extra_args": ["--no-warmup"]}}, Changes(restarted=("a",))),
    "names": ({"a": {}}, {"a": {"aliases": ["x"]}}, Changes(adjusted=("a",))),
    "rules": ({"a": {}}, {"a": {"pin": True, "idle_unload": "1m", "max_queue": 3}}, Changes(adjusted=("a",))),
}


@pytest.mark.parametrize(("old", "new", "changes"), _DIFFERENCES.values(), ids=_DIFFERENCES)
def test_what_differs(demo_model: Path, tmp_path: Path, old: Any, new: Any, changes: Changes) -> None:
    assert difference(demo_model, tmp_path, old, new) == changes


def test_a_default_only_matters_where_it_is_used(demo_model: Path, tmp_path: Path) -> None:
    models = {"own": {}, "default": {"context": None}}
    before = {each.id: each for each in catalog(demo_model, tmp_path, models, defaults={"context": 1024})}
    after = catalog(demo_model, tmp_path, models, defaults={"context": 2048})
    assert compare(before, after).restarted == ("default",)


# What the supervisor makes of it


async def until(condition: Callable[[], bool], *, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def apply(fleet: Fleet, model: Path, models: dict[str, Any], **memory: Any) -> ModelCatalog:
    settings = settings_for(model, fleet.folder, models, memory=memory)
    new = ModelCatalog(settings)
    await fleet.supervisor.apply(new, settings.memory)
    return new


@pytest.mark.slow
async def test_another_engine_beside_the_old_one_when_both_fit(demo_model: Path) -> None:
    async with fleet_of(fake_engine_binary(), demo_model, {"a": {}}, memory={"ram_limit": "8GiB"}) as fleet:
        old = fleet.model("a")
        fleet.switch("a", load_seconds=1)
        async with fleet.supervisor.use(old) as first:
            new = await apply(fleet, demo_model, {"a": {"parallel": 2}}, ram_limit="8GiB")
            # While the new one loads, the old one answers without a wait.
            await until(lambda: len(fleet.starts()) == 2)
            async with asyncio.timeout(0.2), fleet.supervisor.use(new.resolve("a")) as meanwhile:
                assert meanwhile is first
            await until(lambda: fleet.supervisor.backend(old) is not first)
            async with fleet.supervisor.use(new.resolve("a")) as second:
                assert second.slots == 2
            # Who was inside may finish.
            assert first.is_ready
        await until(lambda: not first.is_ready)
        assert fleet.supervisor.status(old).state.value == "ready"
        assert fleet.count("model_state", model="a", state="ready") == 1


async def test_another_engine_after_the_old_one_when_only_one_fits(demo_model: Path) -> None:
    async with fleet_of(fake_engine_binary(), demo_model, {"a": {}}, memory={"ram_limit": "900MiB"}) as fleet:
        old = fleet.model("a")
        async with fleet.supervisor.use(old) as first:
            new = await apply(fleet, demo_model, {"a": {"parallel": 2}}, ram_limit="900MiB")
            # It is found out that both do not fit; from then on requests wait for the new one.
            await until(lambda: fleet.supervisor.backend(old) is None)
            waiting = asyncio.create_task(fleet.supervisor.ready(new.resolve("a")))
            await asyncio.sleep(0.5)
            assert first.is_ready
            assert not waiting.done()
        assert (await waiting).slots == 2
        assert not first.is_ready


async def test_changed_rules_take_effect_without_a_restart(demo_model: Path) -> None:
    async with fleet_of(fake_engine_binary(), demo_model, {"a": {}}) as fleet:
        await fleet.supervisor.ready(fleet.model("a"))
        await apply(fleet, demo_model, {"a": {"idle_unload": "200ms"}})
        await until(lambda: fleet.state("a") == "stopped")
        assert fleet.starts() == ["a"]


async def test_a_removed_model_finishes_and_goes(demo_model: Path) -> None:
    async with fleet_of(fake_engine_binary(), demo_model, {"a": {}, "b": {}}) as fleet:
        a = fleet.model("a")
        async with fleet.supervisor.use(a) as backend:
            await apply(fleet, demo_model, {"b": {}})
            assert backend.is_ready
        await until(lambda: not backend.is_ready)
        assert [status.model.id for status in fleet.supervisor] == ["b"]
        assert 'model="a"' not in fleet.metrics.expose().decode()


async def test_reloads_in_quick_succession_end_with_the_last(demo_model: Path) -> None:
    async with fleet_of(fake_engine_binary(), demo_model, {"a": {}}, memory={"ram_limit": "8GiB"}) as fleet:
        await fleet.supervisor.ready(fleet.model("a"))
        for parallel in (2, 3, 4, 2, 5):
            new = await apply(fleet, demo_model, {"a": {"parallel": parallel}}, ram_limit="8GiB")
        await until(lambda: (backend := fleet.supervisor.backend(new.resolve("a"))) is not None and backend.slots == 5)


# The whole gateway


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class Editable:
    """A gateway whose configuration file a test rewrites."""

    def __init__(self, gateway: GatewayProcess, folder: Path) -> None:
        self.gateway = gateway
        self.file = folder / "config.yaml"
        self.valid = self.file.read_text()
        self.client = httpx.Client(base_url=gateway.url, headers={"authorization": "Bearer lg-root-key"}, timeout=60)

    def edit(self, **sections: Any) -> None:
        self.file.write_text(yaml.safe_dump(yaml.safe_load(self.valid) | sections))

    def reload(self) -> httpx.Response:
        return self.client.post("/admin/reload")


@pytest.fixture
def editable(demo_model: Path, tmp_path: Path) -> Iterator[Editable]:
    (tmp_path / "a.json").write_text('{"chunks": 100, "chunk_interval_seconds": 0.06}')
    config = {
        "engine": {"binary": str(fake_binary(tmp_path))},
        "memory": {"ram_reserve": 0},
        "models": {"a": {"path": str(demo_model), "context": 512, "parallel": 50}},
        "keys": [{"name": name, "hash": hashed(f"lg-{name}-key"), "admin": name == "root"} for name in ("root", "eve")],
    }
    with running_gateway(config, tmp_path, environment={"FAKE_SWITCHES": str(tmp_path)}) as gateway:
        running = Editable(gateway, tmp_path)
        with running.client:
            yield running


@pytest.mark.slow
async def test_fifty_reloads_under_fifty_streams(editable: Editable, tmp_path: Path) -> None:
    url = editable.gateway.url

    async def stream(client: httpx.AsyncClient) -> bytes:
        body = BODY | {"stream": True, "max_tokens": 200}
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            return b"".join([chunk async for chunk in response.aiter_raw()])

    headers = {"authorization": "Bearer lg-eve-key"}
    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as client:
        streams = [asyncio.create_task(stream(client)) for _ in range(50)]
        statuses = []
        for number in range(50):
            if number % 2:
                editable.file.write_text(editable.valid.replace("context", "contxt"))
            else:
                editable.edit(defaults={"max_tokens": 100 + number})
            statuses.append(await client.post(f"{url}/admin/reload", headers={"authorization": "Bearer lg-root-key"}))
        answers = await asyncio.gather(*streams)
    assert [status.status_code for status in statuses] == [200, 400] * 25
    assert all(status.json().get("changes", {}).get("restarted", []) == [] for status in statuses)
    assert "did you mean 'context'?" in statuses[1].json()["error"]["message"]
    assert all(answer.rstrip().endswith(b"data: [DONE]") and answer.count(b'"content":') >= 100 for answer in answers)
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


def test_sighup_does_the_same(editable: Editable, demo_model: Path) -> None:
    entry = {"path": str(demo_model), "context": 512}
    editable.edit(models={"a": entry | {"parallel": 50}, "new": entry})
    editable.gateway.process.send_signal(signal.SIGHUP)
    names = lambda: [model["id"] for model in editable.client.get("/v1/models").json()["data"]]  # noqa: E731
    wait_until(lambda: names() == ["a", "new"], seconds=2, what="the new model is listed")
    editable.file.write_text("models: {")
    editable.gateway.process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: any("the old one stays in force" in line for line in editable.gateway.log), seconds=2, what="a refusal"
    )
    assert names() == ["a", "new"]


@pytest.mark.slow
def test_a_watched_file_is_read_again_by_itself(editable: Editable, demo_model: Path) -> None:
    names = lambda: [model["id"] for model in editable.client.get("/v1/models").json()["data"]]  # noqa: E731
    entry = {"path": str(demo_model), "context": 512}
    server = {"port": 0, "drain_seconds": 2, "watch_config": True}
    # Nobody watches before it is said so; the first reload is asked for.
    editable.edit(server=server)
    assert editable.reload().status_code == 200
    editable.edit(server=server, models={"a": entry | {"parallel": 50}, "new": entry})
    wait_until(lambda: names() == ["a", "new"], seconds=10, what="the new model is listed")
    editable.file.write_text("models: {")
    refused = "the old one stays in force"
    wait_until(lambda: any(refused in line for line in editable.gateway.log), seconds=10, what="a refusal")
    assert names() == ["a", "new"]
    reloads = sum("reloaded:" in line or refused in line for line in editable.gateway.log)
    assert reloads <= 3


def test_a_file_is_told_of_when_it_is_another_and_still(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("a")
    watch = FileWatch(file)
    assert not watch.has_changed()
    file.write_text("ab")
    # It may still be being written.
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]
    file.unlink()
    assert [watch.has_changed() for _ in range(2)] == [False, False]
    (tmp_path / "other").write_text("ab")
    (tmp_path / "other").rename(file)
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]


def test_a_revoked_key_stops_working_at_once(editable: Editable) -> None:
    eve = {"authorization": "Bearer lg-eve-key"}
    assert editable.client.get("/v1/models", headers=eve).status_code == 200
    editable.edit(keys=[{"name": "root", "hash": hashed("lg-root-key"), "admin": True}])
    started = time.monotonic()
    assert editable.reload().status_code == 200
    assert editable.client.get("/v1/models", headers=eve).status_code == 401
    assert time.monotonic() - started < 1


_UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": ({"models": {"a": {"path": "/nowhere/x.gguf"}}}, "models.a.path: there is no file"),
    "no models": ({"models": {}}, "configures no models"),
    "bad flag": ({"models": {"a": {"path": "MODEL", "extra_args": ["--host", "0.0.0.0"]}}}, "--host"),
    "no model file": ({"models": {"a": {"path": "CONFIG", "context": 512}}}, "config.yaml"),
    "default to nowhere": ({"default_model": "zzz"}, "default_model: there is no model 'zzz'"),
    "open door": ({"server": {"host": "0.0.0.0", "port": 0}, "keys": []}, "would let everybody"),
}


def test_what_cannot_be_used_changes_nothing(editable: Editable, demo_model: Path) -> None:
    for sections, reason in _UNUSABLE.values():
        text = yaml.safe_dump(yaml.safe_load(editable.valid) | sections)
        editable.file.write_text(text.replace("MODEL", str(demo_model)).replace("CONFIG", str(editable.file)))
        refused = editable.reload()
        assert refused.status_code == 400
        assert reason in refused.json()["error"]["message"]
        assert editable.client.post("/v1/chat/completions", json=BODY | {"max_tokens": 1}).status_code == 200


def test_what_only_a_restart_changes_is_said(editable: Editable, tmp_path: Path) -> None:
    editable.edit(server={"port": 1}, state_dir=str(tmp_path / "elsewhere"))
    assert editable.reload().json()["needs_restart"] == ["state_dir", "the address and the certificate in server"]
