"""A model that another server has: the same gate, the same truth, and nobody waits for a server that is down."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from app.api import Gateway
from app.backends import RemoteRules
from app.backends.breaker import BreakerRules
from app.config import ModelCatalog, ModelEntry, Settings
from app.engine.binary import EngineBinary, find_engine
from app.main import Server, StopRequest, bind, open_gateway
from app.tokens import BY_LETTERS, Estimator, by_vocabulary
from tests.conftest import CONTEXT_TOKENS, MODEL_ID
from tests.estimated_texts import TEXTS
from tests.fleet import fake_engine_binary, fleet_of
from tests.gateway import running_gateway
from tests.remote_server import KEY, EngineElsewhere, Plain, engine_elsewhere, fake_elsewhere, plain_server

pytestmark = pytest.mark.any_engine

SHORT_CONTEXT = 256
BODY = {"model": "far", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PATIENT = RemoteRules()
QUICK = RemoteRules(look=0.1, silence=0.5, breaker=BreakerRules(failures=2, first_pause=0.3, longest_pause=1.0))


@pytest.fixture(scope="module")
def fake() -> EngineBinary:
    return fake_engine_binary()


@pytest.fixture
def key_in_environment(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("REMOTE_KEY_OF_TEST", KEY)
    return "REMOTE_KEY_OF_TEST"


class Far:
    """A gateway whose models are all elsewhere."""

    def __init__(self, gateway: Gateway, client: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.client = client

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=BODY | fields)

    async def shown(self) -> dict[str, Any]:
        document: dict[str, Any] = (await self.client.get("/v1/models/far")).json()
        return document

    async def becomes(self, **wanted: Any) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while True:
                shown = await self.shown()
                if wanted.items() <= shown.items():
                    return shown
                await asyncio.sleep(0.01)


@asynccontextmanager
async def far_gateway(
    fake: EngineBinary, url: str, folder: Path, *, rules: RemoteRules = QUICK, **fields: Any
) -> AsyncIterator[Far]:
    settings = Settings.model_validate(
        {
            "server": {"port": 0, "drain_seconds": 1},
            "models": {"far": {"url": url} | fields},
            "state_dir": folder / "state",
        }
    )
    with bind(settings) as listener:
        async with open_gateway(settings, fake, remote_rules=rules) as gateway:
            server, stop = Server(gateway), StopRequest()
            serving = asyncio.create_task(server.serve_until(stop, listener))
            await server.started_event.wait()
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as client:
                    yield Far(gateway, client)
            finally:
                stop.ask()
                await serving


# Another server that is real


async def test_a_llama_server_elsewhere(one_engine: str, fake: EngineBinary, demo_model: Path, tmp_path: Path) -> None:
    engine = await asyncio.to_thread(find_engine, one_engine)
    command = (*engine.command, "-m", str(demo_model), "-c", str(SHORT_CONTEXT), "-np", "1", "--jinja")
    async with engine_elsewhere(command) as elsewhere, far_gateway(fake, elsewhere.url, tmp_path, rules=PATIENT) as far:
        shown = await far.becomes(state="ready")
        assert (shown["max_model_len"], shown["circuit"]) == (SHORT_CONTEXT, "closed")
        answer = await far.chat()
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "far"
        # The gate: predicted by the other server's own count, to the token.
        used = answer.json()["usage"]["prompt_tokens"]
        assert answer.headers["x-context-prompt-tokens"] == str(used)
        assert answer.headers["x-context-count"] == "exact"
        fits = await far.chat(max_tokens=SHORT_CONTEXT - used, stop=["."])
        assert fits.status_code == 200
        refused = await far.chat(max_tokens=SHORT_CONTEXT - used + 1)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert refused.json()["error"]["n_ctx"] == SHORT_CONTEXT
        streamed = await far.chat(stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert '"model":"far"' in streamed.text


async def test_a_gateway_elsewhere(gateway: Any, fake: EngineBinary, tmp_path: Path) -> None:
    async with far_gateway(fake, f"{gateway.url}/v1", tmp_path, rules=PATIENT, remote_model=MODEL_ID) as far:
        shown = await far.becomes(state="ready")
        assert shown["max_model_len"] == CONTEXT_TOKENS
        answer = await far.chat()
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]["prompt_tokens"]
        # It counts as its engine does.
        assert answer.headers["x-context-count"] == "exact"
        assert answer.headers["x-context-prompt-tokens"] == str(used)
        refused = await far.chat(max_tokens=CONTEXT_TOKENS)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        metrics = (await far.client.get("/metrics")).text
        assert f'llama_gateway_prompt_tokens_total{{key="anonymous",model="far"}} {used}.0' in metrics


async def test_one_that_cannot_count_is_estimated_on_the_safe_side(
    one_engine: str, fake: EngineBinary, demo_model: Path, tmp_path: Path
) -> None:
    engine = await asyncio.to_thread(find_engine, one_engine)
    command = (*engine.command, "-m", str(demo_model), "-c", str(SHORT_CONTEXT), "-np", "1", "--jinja")
    async with engine_elsewhere(command) as elsewhere:
        plain = Plain(upstream=elsewhere.url, context_tokens=SHORT_CONTEXT)
        async with plain_server(plain) as url:
            for tokenizer in ({}, {"tokenizer": demo_model}):
                async with far_gateway(fake, url, tmp_path, rules=PATIENT, **tokenizer) as far:
                    answer = await far.chat()
                    assert answer.headers["x-context-count"] == "estimate"
                    estimated = int(answer.headers["x-context-prompt-tokens"])
                    assert plain.usages[-1] <= estimated <= plain.usages[-1] + 60
                    refused = await far.chat(max_tokens=SHORT_CONTEXT)
                    assert refused.json()["error"]["code"] == "context_length_exceeded"
        await measure(elsewhere, BY_LETTERS, least=0.0, most=1.4)
        await measure(elsewhere, await asyncio.to_thread(by_vocabulary, demo_model), least=0.0, most=0.05)
    # It got nothing that only llama-server knows.
    assert {name for body in plain.asked for name in body} == {
        "model",
        "messages",
        "max_tokens",
        "stream",
        "stream_options",
    }
    assert {body["model"] for body in plain.asked} == {"plain-model"}


async def measure(elsewhere: EngineElsewhere, estimator: Estimator, *, least: float, most: float) -> None:
    """With its margin no estimate is below the truth, nor far above it."""
    async with httpx.AsyncClient(base_url=elsewhere.url.removesuffix("/v1"), timeout=60, trust_env=False) as client:
        for kind, text in TEXTS.items():
            answer = await client.post("/tokenize", json={"content": text, "parse_special": False})
            true, guess = len(answer.json()["tokens"]), estimator.tokens(text) * (1 + estimator.margin)
            assert least <= guess / true - 1 <= most, f"{kind}: {guess:.0f} estimated, {true} true"


# What goes wrong


async def test_a_server_that_is_down_costs_nobody_any_time(
    fake: EngineBinary, tmp_path: Path, key_in_environment: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="app")
    async with (
        fake_elsewhere(tmp_path / "key") as elsewhere,
        far_gateway(fake, elsewhere.url, tmp_path, key_env=key_in_environment) as far,
    ):
        assert (await far.chat()).status_code == 200
        await elsewhere.kill()
        await far.becomes(circuit="open", state="failed")
        refused = await far.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_failed"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.elapsed.total_seconds() < 0.5
        admin = (await far.client.get("/admin/models/far")).json()
        assert (admin["url"], admin["path"], admin["pid"]) == (elsewhere.url, None, None)
        assert admin["failure"]["reason"] == "it cannot be reached"
        await elsewhere.start()
        await far.becomes(circuit="closed", state="ready")
        assert (await far.chat()).status_code == 200
        events = (await far.client.get("/admin/events")).json()["data"]
        told = [(event["kind"], event["message"]) for event in events if event["model"] == "far"]
        assert told == [
            ("failed", "Its server failed and is not asked for now."),
            ("load", "Its server answers again."),
        ]
        assert KEY not in caplog.text + (await far.client.get("/admin/models")).text


async def test_one_that_answers_its_health_but_nothing_else_is_tried_with_one_request_at_a_time(
    fake: EngineBinary, tmp_path: Path
) -> None:
    plain = Plain(answer=(500, {}, {"error": {"message": f"internal: {KEY} /srv/secret"}}))
    async with plain_server(plain) as url, far_gateway(fake, url, tmp_path) as far:
        answers = [await far.chat() for _ in range(2)]
        assert [answer.status_code for answer in answers] == [502, 502]
        assert KEY not in answers[0].text
        assert (await far.chat()).status_code == 503
        # Its models are listed all the time, which does not make up for it.
        await far.becomes(circuit="half_open")
        sent = len(plain.asked)
        assert sorted(answer.status_code for answer in await asyncio.gather(*(far.chat() for _ in range(8))))[0] == 502
        assert len(plain.asked) == sent + 1
        await far.becomes(circuit="half_open")
        plain.answer = (400, {}, {"error": {"message": "no such thing", "code": None, "param": "seed"}})
        refused = await far.chat()
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")
        assert (await far.shown())["circuit"] == "closed"


_ANSWERS: list[tuple[int, dict[str, str], dict[str, Any], int, str]] = [
    (401, {}, {"error": {"message": f"bad key {KEY}"}}, 502, "upstream_failed"),
    (404, {}, {"error": {"message": "no model"}}, 502, "upstream_failed"),
    (429, {"retry-after": "7"}, {"error": {"message": "slow down"}}, 429, "rate_limit_exceeded"),
    (503, {"retry-after": "9000"}, {"error": {"message": "busy"}}, 503, "server_is_overloaded"),
    (400, {}, {"error": {"message": "too long", "code": "context_length_exceeded"}}, 400, "context_length_exceeded"),
    (302, {"location": "http://127.0.0.1:9/"}, {}, 502, "upstream_failed"),
]


@pytest.mark.parametrize(("status", "headers", "document", "answered", "code"), _ANSWERS)
async def test_what_it_says_is_put_into_our_words(
    fake: EngineBinary,
    tmp_path: Path,
    status: int,
    headers: dict[str, str],
    document: dict[str, Any],
    answered: int,
    code: str,
) -> None:
    plain = Plain(answer=(status, headers, document))
    async with plain_server(plain) as url, far_gateway(fake, url, tmp_path) as far:
        answer = await far.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (answered, code)
        assert KEY not in answer.text
        if "retry-after" in headers:
            assert int(answer.headers["retry-after"]) == min(60, int(headers["retry-after"]))


_BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"die": "rst@3"}, "upstream_failed"),
    ({"die": "eof@3"}, "upstream_failed"),
    ({"half_line": 3}, "upstream_failed"),
    ({"error_event": 3}, "server_is_overloaded"),
    ({"silence_seconds": 2, "silence_at": 3}, "upstream_timeout"),
]


@pytest.mark.parametrize(("switches", "code"), _BROKEN, ids=[next(iter(switches)) for switches, _ in _BROKEN])
async def test_an_answer_that_breaks_off_is_never_passed_off_as_finished(
    fake: EngineBinary, tmp_path: Path, key_in_environment: str, switches: dict[str, Any], code: str
) -> None:
    async with (
        fake_elsewhere(tmp_path / "key", chunk_interval_seconds=0.01, **switches) as elsewhere,
        far_gateway(fake, elsewhere.url, tmp_path, key_env=key_in_environment) as far,
    ):
        whole = await far.chat(max_tokens=8)
        assert whole.json()["error"]["code"] == code
        text = ""
        async with far.client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"stream": True, "max_tokens": 8}
        ) as reply:
            assert reply.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                async for piece in reply.aiter_text():
                    text += piece
        assert f'"code":"{code}"' in text
        assert "[DONE]" not in text


async def test_who_leaves_takes_the_answer_elsewhere_down_with_it(
    fake: EngineBinary, tmp_path: Path, key_in_environment: str
) -> None:
    async with (
        fake_elsewhere(tmp_path / "key", chunks=400, chunk_interval_seconds=0.02) as elsewhere,
        far_gateway(fake, elsewhere.url, tmp_path, key_env=key_in_environment) as far,
    ):
        body = BODY | {"stream": True, "max_tokens": 400}
        async with far.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            await anext(reply.aiter_bytes())
        async with asyncio.timeout(5):
            while (await elsewhere.calls()).get("departed", 0) == 0:
                await asyncio.sleep(0.01)
        # Nobody broke off but the client: the server is as good as before.
        assert (await far.shown())["circuit"] == "closed"


async def test_no_context_and_nobody_who_knows_it(fake: EngineBinary, tmp_path: Path) -> None:
    async with plain_server(Plain(context_tokens=None)) as url:
        async with far_gateway(fake, url, tmp_path) as far:
            await far.becomes(state="failed")
            assert "add 'context'" in (await far.client.get("/admin/models/far")).json()["failure"]["reason"]
            assert (await far.chat()).status_code == 503
        async with far_gateway(fake, url, tmp_path, context=2048) as far:
            assert (await far.becomes(state="ready"))["max_model_len"] == 2048
            plan = await far.client.get("/admin/models/far/plan")
            assert (plan.status_code, "nothing to plan" in plan.text) == (400, True)


async def test_a_hidden_system_prompt_is_learnt_from_what_the_server_reports(
    fake: EngineBinary, tmp_path: Path
) -> None:
    plain = Plain(answer_text="event", hidden_tokens=600)
    async with plain_server(plain) as url, far_gateway(fake, url, tmp_path) as far:
        first, second = await far.chat(), await far.chat()
        assert [answer.status_code for answer in (first, second)] == [200, 200]
        assert int(first.headers["x-context-prompt-tokens"]) < 600
        assert int(second.headers["x-context-prompt-tokens"]) == 600
        refused = await far.chat(max_tokens=500)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_reload_goes_over_to_another_server_and_to_an_engine_of_ours(
    fake: EngineBinary, demo_model: Path, tmp_path: Path
) -> None:
    one, other = Plain(answer_text="one"), Plain(answer_text="other")
    async with plain_server(one) as old, plain_server(other) as new, far_gateway(fake, old, tmp_path) as far:
        supervisor = far.gateway.supervisor

        async def go_over(**fields: Any) -> str:
            settings = far.gateway.settings.model_copy(update={"models": {"far": ModelEntry.model_validate(fields)}})
            catalog = ModelCatalog(settings)
            changes = await supervisor.apply(catalog, settings.memory)
            assert changes.restarted == ("far",)
            far.gateway.catalog = far.gateway.proxy.catalog = catalog
            return str((await far.chat()).json()["choices"][0]["message"]["content"])

        assert (await far.chat()).json()["choices"][0]["message"]["content"] == "one"
        assert await go_over(url=new) == "other"
        assert await go_over(path=demo_model, context=512) not in ("one", "other")
        assert await go_over(url=old) == "one"
        assert [len(server.asked) for server in (one, other)] == [2, 1]


async def test_an_engine_of_ours_never_sees_the_key(
    fake: EngineBinary, demo_model: Path, key_in_environment: str
) -> None:
    async with plain_server(Plain()) as url:
        far = {"path": None, "url": url, "key_env": key_in_environment}
        async with fleet_of(fake, demo_model, {"near": {}, "far": far}) as fleet:
            await fleet.supervisor.ready(fleet.model("near"))
            environment = await asyncio.to_thread(Path(f"/proc/{fleet.pids()[-1]}/environ").read_bytes)
    assert b"FAKE_SWITCHES" in environment
    assert KEY.encode() not in environment


async def test_certificates_are_verified(fake: EngineBinary, tmp_path: Path, key_in_environment: str) -> None:
    authority, plain = trustme.CA(), Plain(answer_text="over TLS")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    async with plain_server(plain, tls=tls) as url:
        async with far_gateway(fake, url, tmp_path, key_env=key_in_environment) as far:
            await far.becomes(state="failed", circuit="open")
            assert (await far.client.get("/admin/models/far")).json()["failure"]["reason"] == (
                "its certificate is not accepted"
            )
        environment = {"SSL_CERT_FILE": str(tmp_path / "authority.pem")}
        with running_gateway({"models": {"far": {"url": url}}}, tmp_path, environment=environment) as process:
            address = await asyncio.to_thread(lambda: process.url)
            async with httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as client:
                answer = await client.post("/v1/chat/completions", json=BODY)
                assert answer.json()["choices"][0]["message"]["content"] == "over TLS"


async def test_a_gateway_for_other_servers_alone_needs_no_engine(demo_model: Path, tmp_path: Path) -> None:
    async with plain_server(Plain(answer_text="far away")) as url:
        file = tmp_path / "config.yaml"
        config = {"engine": {"binary": "/nonexistent/llama-server"}, "models": {"far": {"url": url}}}
        with running_gateway(config, tmp_path) as process:
            address = await asyncio.to_thread(lambda: process.url)
            async with httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as client:
                answer = await client.post("/v1/chat/completions", json=BODY)
                assert answer.json()["choices"][0]["message"]["content"] == "far away"
                both = yaml.safe_load(file.read_text()) | {"models": {"near": {"path": str(demo_model)}}}
                file.write_text(yaml.safe_dump(both))
                refused = await client.post("/admin/reload")
                assert (refused.status_code, "restart it" in refused.text) == (400, True)
