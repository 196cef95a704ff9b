"""The published description, the routes that are, and whatever a program can make of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from app import views
from app.api import router
from app.api.openapi import description
from tests.conftest import MODEL_ID
from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway

# Answers that say what is wrong with the gateway or its engine for the moment, and when to come back.
_TYPED = (502, 503, 504)


def _published() -> set[tuple[str, str]]:
    document = orjson.loads(description())
    return {(method.upper(), path) for path, item in document["paths"].items() for method in item}


# Responses are not kept: these say so.
_NOTHING_KEPT = "/responses/{response_id}"


def _routed() -> set[tuple[str, str]]:
    found = set()
    for route in (*router.routes, *(route for route in views.routes if route.path.startswith("/admin"))):
        if _NOTHING_KEPT in route.path:
            continue
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
            found.add((method, path))
    return found


def test_every_route_is_described_and_nothing_else() -> None:
    """The allow-list: a new route is added here and there, on purpose."""
    published = _published()
    without_v1 = {(method, path.removeprefix("/v1")) for method, path in published if path.startswith("/v1/")}
    assert _routed() - without_v1 == published
    assert without_v1 <= _routed()


@pytest.fixture(scope="module")
def fake(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A fake engine answers at once: what is tried here is the gateway."""
    folder = tmp_path_factory.mktemp("openapi")
    models = {MODEL_ID: {"path": str(demo_model), "context": 512, "parallel": 2}}
    config = {"engine": {"binary": str(fake_binary(folder))}, "models": models, "memory": {"ram_reserve": 0}}
    with running_gateway(config, folder) as running:
        yield running


@pytest.fixture(scope="module")
def described(fake: GatewayProcess) -> Any:
    schema = schemathesis.openapi.from_url(fake.url + "/openapi.json")
    schema.config.generation.update(allow_x00=True)
    return schema


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_the_description_allows(described: Any) -> None:
    for method, path in sorted(_published()):
        operation = described[path][method.lower()]

        @given(case=operation.as_strategy())
        @settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def holds(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL_ID
            _require_conformance(case)

        holds()


def _require_conformance(case: Any) -> None:
    response = case.call()
    if response.status_code in _TYPED:
        assert response.json()["error"]["type"]
        return
    case.validate_response(response, checks=[not_a_server_error, response_schema_conformance, content_type_conformance])


def test_the_description_is_published(fake: GatewayProcess) -> None:
    document = httpx.get(fake.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert document == orjson.loads(description())
