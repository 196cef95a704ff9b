"""A real Prometheus scrapes a real gateway under load: every query that we ship has an answer, every alert its test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.credential import new_key
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, running_gateway, wait_until

# Two minutes are the whole measure.
_LOAD_SECONDS = float(os.environ.get("GATEWAY_TEST_LOAD_SECONDS", "60"))

pytestmark = pytest.mark.any_engine

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "llama-gateway.json"
_LISTENING = re.compile(r"Listening on.*address=127\.0\.0\.1:(\d+)")
# A figure, a comparison, a threshold: the figure has to be there also when nothing is wrong.
_ALERT = re.compile(r"(.*) [<>] [\d.]+", re.DOTALL)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=RULES, capture_output=True, text=True, timeout=60, check=False)


def test_configuration_and_rules_are_valid(promtool: str) -> None:
    checked = run(promtool, "check", "config", "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_fires_for_who_is_in_trouble_and_for_nobody_else(promtool: str) -> None:
    tested = run(promtool, "test", "rules", "alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    cases = yaml.safe_load((RULES / "alerts_test.yml").read_text())["tests"]
    named = {one["alertname"] for case in cases for one in case["alert_rule_test"]}
    assert named == set(alerts())


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = DEPLOY / "grafana" / "dashboard.py"
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['dashboard']()))"
    written = subprocess.run([sys.executable, "-c", code, str(script)], capture_output=True, check=True, timeout=60)
    assert json.loads(written.stdout) == json.loads(DASHBOARD.read_text()), f"run {script.name} again"


def test_the_dashboard_answers_five_questions_in_this_order() -> None:
    rows = [panel["title"] for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] == "row"]
    questions = ["up", "fast", "fills the memory", "uses it", "refused"]
    assert len(rows) == len(questions)
    assert all(question in row for question, row in zip(questions, rows, strict=True))


def rules(file: str) -> list[dict[str, str]]:
    groups = yaml.safe_load((RULES / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for rule in rules("alerts.yml")}


def queries() -> dict[str, str]:
    """Everything that has to have an answer: recorded figures, what alerts look at, what the dashboard shows."""
    wanted = {rule["record"]: rule["record"] for file in ("recording.yml", "vllm.yml") for rule in rules(file)}
    for name, expression in alerts().items():
        figure = _ALERT.fullmatch(expression)
        assert figure, f"{name} does not end in a comparison"
        wanted[name] = figure[1]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            wanted[f"{panel['title']}: {target['legendFormat']}"] = filled_in(target["expr"])
    return wanted


def filled_in(expression: str) -> str:
    for variable, value in (("$__rate_interval", "1m"), ("$__range", "5m"), ("$instance", ".*"), ("$model", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


class Prometheus:
    """One server over the rules that we ship; ``ask`` gives the series that a query has now."""

    def __init__(self, folder: Path, target: str) -> None:
        configuration = yaml.safe_load((RULES / "prometheus.yml").read_text())
        configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        configuration["rule_files"] = [str(RULES / name) for name in configuration["rule_files"]]
        configuration["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        options = (
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        )
        self.process = subprocess.Popen(["prometheus", *options], stderr=subprocess.PIPE, text=True)
        self._client = httpx.Client(timeout=30)
        self._log: list[str] = []
        self._port: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        wait_until(lambda: self._port or self.process.poll() is not None, seconds=30, what="prometheus listens")
        assert self._port, "".join(self._log)
        return f"http://127.0.0.1:{self._port}"

    def is_ready(self) -> bool:
        return self._client.get(f"{self.url}/-/ready").status_code == 200

    def ask(self, query: str) -> list[dict[str, Any]]:
        answer = self._client.get(f"{self.url}/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", answer
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def end(self) -> None:
        self._client.close()
        self.process.terminate()
        self.process.wait(20)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)
            if found := _LISTENING.search(line):
                self._port = found[1]


@contextmanager
def prometheus_over(gateway: GatewayProcess, folder: Path) -> Iterator[Prometheus]:
    folder.mkdir(parents=True)
    server = Prometheus(folder, gateway.url.removeprefix("http://"))
    try:
        wait_until(server.is_ready, seconds=60, what="prometheus answers")
        yield server
    finally:
        server.end()


def load(url: str, key: str, stop: threading.Event) -> None:
    """Answers, streams, refusals and somebody who leaves, over and over."""
    hello = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 12}
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        while not stop.is_set():
            client.post("/v1/chat/completions", json=hello)
            client.post("/v1/chat/completions", json=hello | {"stream": True})
            client.post("/v1/chat/completions", json=hello | {"model": "absent"})
            client.post("/v1/chat/completions", json=hello | {"max_tokens": 1 << 20})
            with client.stream("POST", "/v1/chat/completions", json=hello | {"stream": True, "max_tokens": 90}) as one:
                next(one.iter_bytes())


@contextmanager
def under_load(gateway: GatewayProcess, key: str) -> Iterator[None]:
    stop = threading.Event()
    loader = threading.Thread(target=load, args=(gateway.url, key, stop))
    loader.start()
    try:
        yield
    finally:
        stop.set()
        loader.join(60)


def configuration(engine: str, model: Path, key_hash: str) -> Mapping[str, Any]:
    return {
        "engine": {"binary": engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {MODEL_ID: {"path": str(model), "context": 512, "parallel": 2}},
        "keys": [{"name": "alice", "hash": key_hash, "admin": True, "tokens_per_day": 10_000_000}],
    }


def unanswered(server: Prometheus, asked: Mapping[str, str]) -> dict[str, str]:
    return {name: query for name, query in asked.items() if not server.ask(query)}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("promtool")
def test_every_query_returns_a_series_as_long_as_there_is_load(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    key, key_hash = new_key()
    with (
        running_gateway(configuration(one_engine, demo_model, key_hash), tmp_path / "gateway") as gateway,
        prometheus_over(gateway, tmp_path / "prometheus") as server,
        under_load(gateway, key),
    ):
        ends, missing = time.monotonic() + _LOAD_SECONDS, queries()
        while missing and time.monotonic() < ends:
            missing = unanswered(server, missing)
        assert not missing
        # From now on everything has an answer, all the time.
        while time.monotonic() < ends:
            assert not unanswered(server, queries())
            time.sleep(5)
        assert server.ask("up")[0]["value"][1] == "1"


@pytest.mark.slow
@pytest.mark.usefixtures("promtool")
def test_scraping_an_idle_gateway_loads_nothing_and_wakes_nothing(
    one_engine: str, demo_model: Path, tmp_path: Path
) -> None:
    _, key_hash = new_key()
    with (
        running_gateway(configuration(one_engine, demo_model, key_hash), tmp_path / "gateway") as gateway,
        prometheus_over(gateway, tmp_path / "prometheus") as server,
    ):
        state = f'llama_gateway_model_state{{model="{MODEL_ID}", state="stopped"}}'
        scrapes = f"count_over_time({state}[5m])"
        wait_until(
            lambda: server.ask(scrapes) and float(server.ask(scrapes)[0]["value"][1]) >= 4,
            seconds=40,
            what="four scrapes",
        )
        assert server.ask(state)[0]["value"][1] == "1"
        assert gateway.engine_pids() == []
