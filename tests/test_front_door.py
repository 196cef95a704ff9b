"""Who may come in: by which name the gateway is called, from which page, and over https."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from app.api.front_door import DoorRules, OriginNotAllowed, UnknownHost
from app.config import Settings
from app.credential import new_key
from app.errors import ConfigError
from app.main import check_certificate
from tests.checklist import lines, rows
from tests.gateway import GatewayProcess, running_gateway

_PAGE = "https://chat.example.org"


def _rules(**server: Any) -> DoorRules:
    keys = server.pop("keys", ())
    return DoorRules.of(Settings.model_validate({"server": server, "keys": keys}))


_KEY = {"name": "alice", "hash": new_key()[1]}
_OURS = [
    "127.0.0.1:8080",
    "[::1]:8080",
    "localhost",
    "LOCALHOST:1",
    "192.168.1.7:8080",
    f"{socket.gethostname()}:8080",
    "",
]
_THEIRS = ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example:80", "2130706433"]


@pytest.mark.parametrize("host", _OURS)
def test_own_names(host: str) -> None:
    _rules().check_host(host)


@pytest.mark.parametrize("host", _THEIRS)
def test_a_name_that_somebody_else_may_have_pointed_here(host: str) -> None:
    with pytest.raises(UnknownHost, match=r"server\.allowed_hosts"):
        _rules().check_host(host)


def test_names_that_the_operator_allows() -> None:
    rules = _rules(allowed_hosts=["Box.example.org"])
    rules.check_host("box.example.org:8080")
    with pytest.raises(UnknownHost):
        rules.check_host("other.example.org")
    _rules(allowed_hosts=["*"]).check_host("other.example.org")


def test_with_keys_any_name_will_do_unless_names_are_listed() -> None:
    _rules(keys=[_KEY]).check_host("box.example.org")
    with pytest.raises(UnknownHost):
        _rules(keys=[_KEY], allowed_hosts=["box"]).check_host("box.example.org")


@pytest.mark.parametrize("origin", [_PAGE, _PAGE.upper(), _PAGE + "/"])
def test_a_page_that_may(origin: str) -> None:
    assert _rules(cors_origins=[_PAGE]).check_origin(origin, "127.0.0.1:8080") is True


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example.org", "null", "", "http://127.0.0.1:81"]
)
def test_a_page_that_may_not(origin: str) -> None:
    with pytest.raises(OriginNotAllowed, match=r"server\.cors_origins"):
        _rules(cors_origins=[_PAGE]).check_origin(origin, "127.0.0.1:8080")


def test_our_own_page_is_no_stranger() -> None:
    assert _rules().check_origin("http://127.0.0.1:8080", "127.0.0.1:8080") is False


@pytest.mark.parametrize("value", ["chat.example.org", "https://chat.example.org/path", "https://", 5])
def test_what_is_no_origin(value: object) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        _rules(cors_origins=[value])


@pytest.fixture(scope="module")
def door(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose model is never loaded."""
    config = {"server": {"cors_origins": [_PAGE]}, "models": {"m": {"path": str(demo_model)}}}
    with running_gateway(config, tmp_path_factory.mktemp("door")) as running:
        yield running


@rows(38)
def test_rebinding_is_refused_before_any_work(door: GatewayProcess) -> None:
    for path in ("/v1/models", "/metrics", "/livez", "/admin/models", "/nothing"):
        answer = httpx.get(door.url + path, headers={"host": "evil.example:8080"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert answer.headers["x-request-id"]


@rows(38)
@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
def test_a_strange_page_is_refused_before_any_work(door: GatewayProcess, origin: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(door.url + "/v1/chat/completions", json=body, headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers
    preflight = httpx.options(door.url + "/v1/chat/completions", headers={"origin": origin})
    assert preflight.status_code == 403


@lines(22)
def test_a_page_that_may_ask_is_answered_so_that_it_can_read(door: GatewayProcess) -> None:
    asks = {
        "origin": _PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-foo",
    }
    preflight = httpx.options(door.url + "/v1/chat/completions", headers=asks)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == _PAGE
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-foo"
    answer = httpx.get(door.url + "/v1/models", headers={"origin": _PAGE})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == _PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    error = httpx.get(door.url + "/nothing", headers={"origin": _PAGE})
    assert error.headers["access-control-allow-origin"] == _PAGE


def test_https(demo_model: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    both = str(tmp_path / "both.pem")
    config = {"server": {"tls_certificate": both, "tls_key": both}, "models": {"m": {"path": str(demo_model)}}}
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with running_gateway(config, tmp_path) as running:
        assert running.url.startswith("https://")
        answer = httpx.get(running.url + "/v1/models", verify=trust)
    assert answer.json()["data"][0]["id"] == "m"


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    file.write_text("nothing")
    server = Settings.model_validate({"server": {"tls_certificate": file, "tls_key": file}}).server
    with pytest.raises(ConfigError, match="PEM files that belong together"):
        check_certificate(server)


def test_a_certificate_without_its_key() -> None:
    with pytest.raises(ValueError, match="belong together"):
        Settings.model_validate({"server": {"tls_certificate": "x.pem"}})
