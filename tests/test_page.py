"""The status page over HTTP: who sees what, what a browser is told to refuse, one task for all, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.errors import InvalidApiKey
from app.views.broadcast import Broadcaster
from app.views.memory_map import Place, Portion
from app.views.observer import ModelView, Sample
from app.views.page import Page
from app.views.scene import Audience
from app.views.stream import LiveResponse
from tests.gateway import GatewayProcess, running_gateway, wait_until
from tests.test_admin import ADMIN, USER, becomes, config, hashed

OPERATOR = Audience(is_operator=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def gateway(folder: Path, demo_model: Path) -> Iterator[GatewayProcess]:
    keys = [
        {"name": "root", "hash": hashed(ADMIN), "admin": True},
        {"name": "eve", "hash": hashed(USER), "models": ["a"]},
    ]
    (folder / "org").mkdir()
    environment = {"FAKE_SWITCHES": str(folder)}
    with running_gateway(config(folder, demo_model, keys=keys), folder, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def open_gateway(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[GatewayProcess]:
    """One without keys."""
    folder = tmp_path_factory.mktemp("open")
    server = {"drain_seconds": 30}
    sections = config(folder, demo_model, server=server)
    with running_gateway(sections, folder, environment={"FAKE_SWITCHES": str(folder)}) as running:
        yield running


def client_of(gateway: GatewayProcess, key: str = "") -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=gateway.url, headers=headers, timeout=30)


def first_frame(client: httpx.Client) -> dict[str, Any]:
    with client.stream("GET", "/ui/stream") as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                frame: dict[str, Any] = orjson.loads(line.removeprefix("data: "))
                return frame
    raise AssertionError("the stream ended before its first frame")


# --- the frame and its files ------------------------------------------------------------------------------------------


def test_the_page_is_the_same_for_everybody_and_names_no_model(gateway: GatewayProcess) -> None:
    with client_of(gateway) as client:
        page = client.get("/")
        assert page.text == client.get("/ui").text
        assert "org/b" not in page.text
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-store"
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        # Nothing inline, nothing from elsewhere.
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=\"", page.text)
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page.text)
        for path in re.findall(r"(?:src|href)=\"(ui/assets/[^\"]+)\"", page.text):
            asset = client.get(f"/{path}")
            assert asset.status_code == 200
            assert "immutable" in asset.headers["cache-control"]
            assert asset.headers["x-content-type-options"] == "nosniff"
            assert not re.search(rb"(?:https?:)?//(?!www\.w3\.org/)[a-z0-9-]+\.[a-z]{2}", asset.content.lower())


@pytest.mark.parametrize("name", ["secret.txt", "..%2fpage.py", "page.css%00", "%2e%2e/page.py"])
def test_there_are_no_other_files(gateway: GatewayProcess, name: str) -> None:
    with client_of(gateway) as client:
        assert client.get(f"/ui/assets/{name}").status_code == 404


def test_the_name_that_a_client_calls_us_by_is_only_text(gateway: GatewayProcess) -> None:
    with client_of(gateway) as client:
        page = client.get("/", headers={"host": 'x"><script>alert(1)</script>'})
        assert "<script>alert" not in page.text


# --- who sees what ----------------------------------------------------------------------------------------------------


def test_without_a_key_nothing_is_shown(gateway: GatewayProcess) -> None:
    with client_of(gateway) as client:
        for path in ("/ui/stream", "/admin/status"):
            assert client.get(path).json()["error"]["code"] == "invalid_api_key"


def test_operators_see_everything(gateway: GatewayProcess) -> None:
    with client_of(gateway, ADMIN) as client:
        client.post("/admin/models/org/b/load")
        becomes(client, "org/b", "ready")
        frame = first_frame(client)
        assert (frame["operator"], frame["models"]) == (True, ["a", "org/b"])
        assert {"instruments", "memory", "events", "model:a", "model:org/b"} == frame["regions"].keys()
        assert 'data-act="unload"' in frame["regions"]["model:org/b"]
        assert "<summary>Engine log" in frame["regions"]["model:a"]
        status = client.get("/admin/status").json()
        plan = client.get("/admin/models/org/b/plan").json()["memory"]["host"]
        (ram,) = status["places"]
        assert {f"{one['part']}_bytes": one["size_bytes"] for one in ram["planned"]} == {
            name: size for name, size in plan.items() if size and name not in ("total_bytes", "left_bytes")
        }
        for portion in ram["planned"]:
            assert f'data-part="{portion["part"]}" data-bytes="{portion["size_bytes"]}"' in frame["regions"]["memory"]
        assert [model["state"] for model in status["models"]] == ["stopped", "ready"]
        assert status["events"][-1]["kind"] == "load"


def test_others_see_their_models_without_paths_logs_or_buttons(gateway: GatewayProcess, folder: Path) -> None:
    (folder / "a.json").write_text(
        '{"die": "exit1@load", "log_lines": ["error while loading shared libraries: /srv/secret.gguf"]}'
    )
    with client_of(gateway, ADMIN) as admin, client_of(gateway, USER) as user:
        admin.post("/admin/models/a/load")
        becomes(admin, "a", "failed")
        # The look that all watchers share may be a second old.
        wait_until(
            lambda: "It cannot be started" in first_frame(user)["regions"]["model:a"], seconds=10, what="the page knows"
        )
        frame = first_frame(user)
        assert (frame["operator"], frame["models"]) == (False, ["a"])
        assert frame["regions"].keys() == {"instruments", "events", "model:a"}
        shown = "".join(frame["regions"].values())
        for secret in ("org/b", "data-act", "data-log", "secret.gguf", str(folder), "Plan:"):
            assert secret not in shown
        assert "It cannot be started" in frame["regions"]["model:a"]
        seen_by_operator = first_frame(admin)["regions"]
        assert "secret.gguf" in seen_by_operator["model:a"]
        assert user.get("/admin/status").json()["error"]["code"] == "admin_required"
    (folder / "a.json").unlink()


def test_without_keys_only_our_own_page_on_this_machine(open_gateway: GatewayProcess) -> None:
    own = open_gateway.url
    foreign = [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": f"{own}1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"x-forwarded-for": "203.0.113.7"},
        {"forwarded": "for=203.0.113.7"},
    ]
    with client_of(open_gateway) as client:
        for headers in foreign:
            for method, path in (("GET", "/ui/stream"), ("GET", "/admin/status"), ("POST", "/admin/models/a/load")):
                assert client.request(method, path, headers=headers).status_code == 403, (path, headers)
        assert client.get("/admin/models/a").json()["state"] == "stopped"
        page = {"origin": own, "sec-fetch-site": "same-origin"}
        assert client.post("/admin/models/a/load", headers=page).status_code == 202
        becomes(client, "a", "ready")
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403


# --- one task for everybody -------------------------------------------------------------------------------------------


def sample(*names: str, busy: int = 0) -> Sample:
    models = tuple(
        ModelView(
            id=name,
            kind="chat",
            is_remote=False,
            aliases=(),
            state="ready",
            why="Serving.",
            since=None,
            detail="/srv/x",
            is_pinned=False,
            about="llama",
            placement="on the CPU",
            context_tokens=512,
            slots=1,
            busy=busy,
            waiting=0,
            waiting_for_model=0,
            load_seconds=1.0,
            resident_bytes=1,
            answer_rate=None,
            prompt_rate=None,
            last_answer_rate=None,
            last_prompt_rate=None,
            expected_answer_rate=None,
            expected_basis=None,
            reasons=(("threads", "2", "cores"),),
            running=(),
            points=(),
        )
        for name in names
    )
    place = Place("RAM", "", 1 << 30, 0, 0, planned=(Portion(names[0], "weights", 1 << 20),))
    return Sample(time.time(), 0, False, models, (place,), ())


class Scene:
    """What a broadcaster looks at, and how often it has looked."""

    def __init__(self) -> None:
        self.looks = 0
        self.is_draining = False
        self.now = sample("a", "b")

    def look(self) -> Sample:
        self.looks += 1
        return self.now

    def broadcaster(self) -> Broadcaster:
        return Broadcaster(Page(), look=self.look, is_draining=lambda: self.is_draining, interval_seconds=0.01)


async def test_many_watchers_cost_one_look_and_one_drawing() -> None:
    scene = Scene()
    broadcaster = scene.broadcaster()
    await asyncio.sleep(0.03)
    assert scene.looks == 0
    with broadcaster.watch(OPERATOR) as first:
        for _ in range(50):
            with broadcaster.watch(OPERATOR) as again:
                assert again is first
        assert scene.looks == 1
        frames = first.frame
        await asyncio.gather(*(broadcaster.change() for _ in range(50)))
        assert (scene.looks, first.frame) == (2, frames + 1)
        # Nothing looks different, so nothing is sent.
        assert first.since(frames) == {}
        scene.now = sample("a", "c", busy=1)
        await broadcaster.change()
        # The card of "a" is drawn again and comes out as it was.
        assert first.since(frames).keys() == {"instruments", "model:c"}
        assert first.models() == ["a", "c"]
    looks = scene.looks
    await asyncio.sleep(0.03)
    assert scene.looks == looks


def test_of_many_slots_the_idle_ones_are_one_piece() -> None:
    (model,) = sample("a").models
    page = Page()

    def drawn(slots: int) -> str:
        now = dataclasses.replace(sample("a"), models=(dataclasses.replace(model, slots=slots),))
        (card,) = (region for region in page.regions(now, OPERATOR) if region.name == "model:a")
        return card.render()

    assert drawn(8).count('class="slot slot-idle"') == 8
    assert drawn(48).count('class="slot slot-idle"') == 1
    assert "48 idle" in drawn(48)


async def test_a_page_that_cannot_be_drawn_leaves_nothing_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    broadcaster = scene.broadcaster()
    good, scene.now = scene.now, dataclasses.replace(scene.now, models=(None,))  # type: ignore[arg-type]
    with pytest.raises(AttributeError), broadcaster.watch(OPERATOR):
        pass
    assert broadcaster.watchers == 0
    scene.now = good
    with broadcaster.watch(OPERATOR) as board:
        scene.now = dataclasses.replace(good, models=(None,))  # type: ignore[arg-type]
        await broadcaster.change()
        assert "could not be drawn" in caplog.text
        scene.now = sample("c")
        while board.models() != ["c"]:
            await broadcaster.change()


async def test_each_audience_has_a_board_of_its_own() -> None:
    scene = Scene()
    broadcaster = scene.broadcaster()
    with (
        broadcaster.watch(OPERATOR) as all_of_it,
        broadcaster.watch(Audience(is_operator=False, models=frozenset({"b"}))) as part,
    ):
        assert all_of_it.models() == ["a", "b"]
        assert part.since(0).keys() == {"instruments", "events", "model:b"}
        assert "/srv/x" not in "".join(part.since(0).values())
        assert broadcaster.watchers == 2
    assert broadcaster.watchers == 0


class Watcher:
    """A client of a LiveResponse; ``leave`` is its disconnect."""

    def __init__(self, response: LiveResponse) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()
        self.got = asyncio.Event()
        self.task = asyncio.create_task(response({"type": "http"}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got.set()


async def test_a_watcher_that_leaves_leaves_nothing_behind() -> None:
    scene = Scene()
    broadcaster = scene.broadcaster()
    watcher = Watcher(LiveResponse(broadcaster, lambda: OPERATOR))
    await watcher.got.wait()
    assert broadcaster.watchers == 1
    watcher.leave.set()
    await watcher.task
    assert broadcaster.watchers == 0


async def test_a_revoked_key_and_a_stopping_gateway_end_the_stream() -> None:
    scene = Scene()
    broadcaster = scene.broadcaster()
    is_revoked = False

    def audience() -> Audience:
        if is_revoked:
            raise InvalidApiKey("gone")
        return OPERATOR

    revoked, stays = (Watcher(LiveResponse(broadcaster, who)) for who in (audience, lambda: OPERATOR))
    await asyncio.gather(revoked.got.wait(), stays.got.wait())
    is_revoked = True
    await revoked.task
    assert broadcaster.watchers == 1
    scene.is_draining = True
    await stays.task
    for watcher in (revoked, stays):
        assert watcher.sent[-1] == {
            "type": "http.response.body",
            "body": b"event: end\ndata: {}\n\n",
            "more_body": False,
        }


# --- the end ----------------------------------------------------------------------------------------------------------


def test_an_open_page_does_not_hold_up_a_stop(open_gateway: GatewayProcess) -> None:
    """The last of its module: it stops the gateway without keys, which would drain for 30 s."""
    with client_of(open_gateway) as client, client.stream("GET", "/ui/stream") as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        open_gateway.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert "event: end" in list(lines)
        assert open_gateway.process.wait(10) == 0
        # An interval, the engine's end, and the process's own.
        assert time.monotonic() - started < 6
