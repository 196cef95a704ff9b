"""The routes of the operator: who may use them, and what they do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway, wait_until

ADMIN, USER = "lg-admin-key-for-tests", "lg-user-key-for-tests"


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def config(folder: Path, model: Path, **sections: Any) -> dict[str, Any]:
    models = {
        "a": {"path": str(model), "context": 512, "aliases": ["x"]},
        "org/b": {"path": str(model), "context": 512},
    }
    return {
        "engine": {"binary": str(fake_binary(folder))},
        "memory": {"ram_reserve": 0},
        "models": models,
        **sections,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admin")


@pytest.fixture(scope="module")
def gateway(folder: Path, demo_model: Path) -> Iterator[GatewayProcess]:
    keys = [
        {"name": "root", "hash": hashed(ADMIN), "admin": True},
        {"name": "eve", "hash": hashed(USER)},
    ]
    (folder / "org").mkdir()
    environment = {"FAKE_SWITCHES": str(folder)}
    with running_gateway(config(folder, demo_model, keys=keys), folder, environment=environment) as running:
        yield running


@pytest.fixture
def admin(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=30) as client:
        yield client


def becomes(client: httpx.Client, model: str, state: str) -> dict[str, Any]:
    wait_until(
        lambda: client.get(f"/admin/models/{model}").json()["state"] == state, seconds=10, what=f"{model} {state}"
    )
    document: dict[str, Any] = client.get(f"/admin/models/{model}").json()
    return document


ROUTES = [
    ("GET", "/admin/models"),
    ("GET", "/admin/models/a"),
    ("POST", "/admin/models/a/load"),
    ("POST", "/admin/models/a/unload"),
    ("GET", "/admin/models/a/plan"),
    ("GET", "/admin/models/a/logs"),
    ("POST", "/admin/reload"),
    ("GET", "/admin/events"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_admin_keys_get_in(gateway: GatewayProcess, method: str, path: str) -> None:
    with httpx.Client(base_url=gateway.url) as client:
        assert client.request(method, path).status_code == 401
        refused = client.request(method, path, headers={"authorization": f"Bearer {USER}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_required")


def test_a_model_is_loaded_looked_at_and_unloaded(admin: httpx.Client) -> None:
    assert [model["id"] for model in admin.get("/admin/models").json()["data"]] == ["a", "org/b"]
    assert admin.get("/admin/models/a").json()["state"] == "stopped"
    preview = admin.get("/admin/models/a/plan").json()
    assert (preview["placement"]["context_per_request"], preview["argv"]) == (512, [])
    # By an alias too.
    assert admin.post("/admin/models/x/load").status_code == 202
    document = becomes(admin, "a", "ready")
    assert document["pid"] > 0
    assert document["slots"] == {"total": 1, "busy": 0}
    assert document["requests"] == {"in_flight": 0, "waiting_for_slot": 0, "waiting_for_model": 0}
    assert document["load_seconds"] > 0
    plan = admin.get("/admin/models/a/plan").json()
    assert plan["placement"]["context_per_request"] == 512
    assert "--ctx-size" in plan["argv"]
    assert plan["argv"][plan["argv"].index("--api-key-file") + 1] == "[redacted]"
    lines = admin.get("/admin/models/a/logs", params={"lines": 2}).json()["lines"]
    assert len(lines) == 2
    assert "model loaded" in lines[-1]
    assert admin.post("/admin/models/a/unload").status_code == 202
    assert becomes(admin, "a", "stopped")["pid"] is None


def test_a_name_with_a_slash(admin: httpx.Client) -> None:
    assert admin.post("/admin/models/org/b/load").status_code == 202
    assert becomes(admin, "org/b", "ready")["id"] == "org/b"
    assert admin.get("/admin/models/org%2Fb/logs").json()["model"] == "org/b"
    admin.post("/admin/models/org/b/unload")
    becomes(admin, "org/b", "stopped")


def test_a_failed_model_says_why(admin: httpx.Client, folder: Path) -> None:
    (folder / "a.json").write_text(
        '{"die": "exit1@load", "log_lines": ["llama_model_load: error loading model: Bearer abcdefghijklmnop"]}'
    )
    admin.post("/admin/models/a/load")
    document = becomes(admin, "a", "failed")
    assert document["failure"]["cause"] == "bad_file"
    assert document["failure"]["next_try_seconds"] > 250
    assert any("[redacted]" in line for line in document["failure"]["log"])
    assert "abcdefghijklmnop" not in str(document)
    assert "abcdefghijklmnop" not in admin.get("/admin/models/a/logs").text
    (folder / "a.json").unlink()
    admin.post("/admin/models/a/load")
    assert becomes(admin, "a", "ready")["failure"] is None


@pytest.mark.parametrize("lines", ["0", "401", "-1", "many", "9" * 5000])
def test_a_wrong_number_of_lines(admin: httpx.Client, lines: str) -> None:
    refused = admin.get("/admin/models/a/logs", params={"lines": lines})
    assert refused.status_code in (400, 414)


def test_what_happened_is_told_in_order(admin: httpx.Client) -> None:
    admin.post("/admin/models/a/unload")
    becomes(admin, "a", "stopped")
    before = max((event["number"] for event in admin.get("/admin/events").json()["data"]), default=0)
    admin.post("/admin/models/a/load")
    becomes(admin, "a", "ready")
    admin.post("/admin/models/a/unload")
    becomes(admin, "a", "stopped")
    admin.post("/admin/reload").raise_for_status()
    events = admin.get("/admin/events", params={"after": before}).json()["data"]
    assert [(event["kind"], event["model"]) for event in events] == [("load", "a"), ("unload", "a"), ("reload", None)]
    last = admin.get("/admin/events", params={"after": before, "limit": 1}).json()["data"]
    assert [event["message"] for event in last] == ["The configuration was read again."]


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "501"}, {"after": "-1"}, {"after": "٣"}])
def test_a_wrong_window_of_events(admin: httpx.Client, query: dict[str, str]) -> None:
    assert admin.get("/admin/events", params=query).json()["error"]["code"] == "invalid_value"


def test_an_unknown_model(admin: httpx.Client) -> None:
    for path in ("/admin/models/zzz", "/admin/models/zzz/plan"):
        assert admin.get(path).json()["error"]["code"] == "model_not_found"
    assert admin.post("/admin/models/zzz/load").status_code == 404


def test_without_keys_programs_on_this_machine_are_admins_and_web_pages_are_not(
    demo_model: Path, tmp_path: Path
) -> None:
    environment = {"FAKE_SWITCHES": str(tmp_path)}
    with (
        running_gateway(config(tmp_path, demo_model), tmp_path, environment=environment) as gateway,
        httpx.Client(base_url=gateway.url) as client,
    ):
        assert client.get("/admin/models").status_code == 200
        refused = client.post("/admin/models/a/load", headers={"origin": "https://evil.example"})
        assert refused.json()["error"]["code"] == "origin_not_allowed"
        assert client.get("/admin/models/a").json()["state"] == "stopped"
