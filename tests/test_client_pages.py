"""Every example of the client pages does what it says, against a real gateway."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import httpx
import orjson
import pytest
import yaml

from tests.calling_model import calling_gateway
from tests.client_pages import FOLDER, adapted, example, examples
from tests.conftest import MODEL_ID
from tests.gateway import GatewayProcess, running_gateway
from tests.langchain_standard import CANNOT
from tests.odd_engines import serving_odd_engines

pytestmark = pytest.mark.any_engine

_ROOT = FOLDER.parents[1]
_PAGE = "openai.md"


def _run(
    *command: str | Path, folder: Path, seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the extra ``clients``, apart from ours for its plugins of pytest.

    GATEWAY_TEST_CLIENTS names one that is there already.
    """
    if named := os.environ.get("GATEWAY_TEST_CLIENTS"):
        return Path(named) / "bin"
    folder = tmp_path_factory.mktemp("clients")
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    _run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    programs = folder / "venv" / "bin"
    _run(programs / "pip", "install", "-q", *extras["clients"], folder=folder, seconds=600)
    return programs


def test_python(gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(_mine("Python", "python", gateway), _PAGE, "exec"), {})
    text, response, streamed_and_counted = capsys.readouterr().out.splitlines()
    assert len(text) > 10
    assert response.endswith("incomplete")
    assert len(streamed_and_counted) > 10


def test_curl(gateway: GatewayProcess, tmp_path: Path) -> None:
    printed = _run("sh", "-euc", _mine("curl", "sh", gateway), folder=tmp_path).stdout
    assert '"object":"list"' in printed
    assert '"chat.completion"' in printed
    assert "event: response.incomplete" in printed


def test_the_files_of_the_agents_can_be_read() -> None:
    """Their programs are not installed here; what is to be written into their files is at least whole."""
    (continue_file,) = examples("agents.md", language="yaml")
    (model,) = yaml.safe_load(continue_file)["models"]
    assert model["apiBase"] == "http://127.0.0.1:8080/v1"
    metadata, opencode = map(orjson.loads, examples("agents.md", language="json"))
    limits = metadata["openai/model"]
    assert limits["max_input_tokens"] + limits["max_output_tokens"] == 32768
    provider, name = opencode["model"].split("/")
    assert opencode["provider"][provider]["options"]["baseURL"] == "http://127.0.0.1:8080/v1"
    assert name in opencode["provider"][provider]["models"]
    for shell in examples("agents.md", language="sh"):
        subprocess.run(["sh", "-n", "-c", shell], check=True)


@pytest.fixture(scope="session")
def node(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program beside OpenAI's Node SDK and returns what it printed."""
    folder, path = tmp_path_factory.mktemp("node"), f"{clients}:{os.environ['PATH']}"
    _run("npm", "install", "--no-audit", "--no-fund", "openai@6", folder=folder, seconds=300, PATH=path)

    def run(code: str, **environment: str) -> str:
        (folder / "program.mjs").write_text(code)
        return _run("node", "program.mjs", folder=folder, PATH=path, **environment).stdout

    return run


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_node(gateway: GatewayProcess, node: Callable[..., str]) -> None:
    text, streamed = node(_mine("Node", "js", gateway)).split("\n", 1)
    assert len(text) > 10
    assert len(streamed) > 10


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_nodes_helpers_tools_embeddings_errors_and_retries(
    native_engine: Path | None, demo_model: Path, node: Callable[..., str], tmp_path: Path
) -> None:
    engine = "embedded" if native_engine is None else str(native_engine)
    vectors = {"path": str(demo_model), "kind": "embedding", "context": 256}
    config = {"engine": {"binary": engine}, "memory": {"ram_reserve": "256MiB"}, "models": {"vectors": vectors}}
    (tmp_path / "odd").mkdir()
    with (
        serving_odd_engines(demo_model, tmp_path / "odd") as odd,
        running_gateway(config, tmp_path / "vectors") as embedding,
    ):
        program = (_ROOT / "tests" / "openai_node.mjs").read_text()
        seen = orjson.loads(node(program, GATEWAY_URL=odd.url, VECTORS_URL=embedding.url))
        metrics = httpx.get(odd.url + "/metrics").text
    assert seen["tools"]["roles"] == ["user", "assistant", "tool", "tool"]
    assert (seen["tools"]["calls"], seen["tools"]["looks"]) == (["look"] * 2, ["北京", "x"])
    assert (seen["stream"], seen["response"]) == ({"content": "42", "deltas": "42"}, "42")
    assert seen["embeddings"]["lengths"] == [576, 576]
    assert seen["embeddings"]["apart"] < 1e-4
    assert seen["faults"] == {
        "unknown": ["NotFoundError", 404, "model_not_found"],
        "overflow": ["BadRequestError", 400, "context_length_exceeded"],
        "tries": ["InternalServerError", 503, "server_is_overloaded"],
        "once": ["InternalServerError", 502, "upstream_failed"],
    }
    counted = 'llama_gateway_requests_total{endpoint="chat",model="%s",outcome="%s"} %d.0'
    for figures in (("failing", "failed", 3), ("unending", "failed", 1), ("slow", "client_gone", 1)):
        assert counted % figures in metrics


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_langchain(gateway: GatewayProcess, clients: Path, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(_mine("LangChain", "python", gateway))
    text, streamed = _run(clients / "python", "example.py", folder=tmp_path).stdout.split("\n", 1)
    assert len(text) > 10
    assert len(streamed) > 10


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_llm(gateway: GatewayProcess, clients: Path, tmp_path: Path) -> None:
    path = f"{clients}:{os.environ['PATH']}"
    environment = {"PATH": path, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    printed = _run("sh", "-euc", _mine("llm", "sh", gateway), folder=tmp_path, **environment).stdout
    assert len(printed) > 10


def _mine(heading: str, language: str, gateway: GatewayProcess) -> str:
    return _of(_PAGE, heading, language, gateway)


def _of(page: str, heading: str, language: str, gateway: GatewayProcess) -> str:
    return adapted(example(page, heading, language=language), url=gateway.url, model=MODEL_ID)


@pytest.mark.slow
def test_an_agent_calls_its_tool_and_answers(native_engine: Path | None, demo_model: Path, tmp_path: Path) -> None:
    with calling_gateway(native_engine, demo_model, tmp_path) as gateway:
        (tmp_path / "example.py").write_text(_of("agents.md", "Pydantic AI", "python", gateway))
        printed = _run(sys.executable, "-W", "error", "example.py", folder=tmp_path).stdout
    answer, usage = printed.rstrip().rsplit("\n", 1)
    assert len(answer) > 10
    # A small model may call it twice at once.
    assert re.search(r"requests=2, tool_calls=[12]\b", usage)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_langchain_standard_tests(one_engine: str, demo_model: Path, clients: Path, tmp_path: Path) -> None:
    """All that the model can pass pass, and none of those that it cannot has become able to in silence."""
    model = {"path": str(demo_model), "context": 2048, "parallel": 2, "max_tokens": 400}
    config = {
        "engine": {"binary": one_engine},
        "memory": {"ram_reserve": "256MiB"},
        "models": {"model": model, "other": model},
    }
    report = tmp_path / "report.xml"
    # Away from our own conftest.
    shutil.copy(_ROOT / "tests" / "langchain_standard.py", tmp_path)
    arguments = ["-p", "no:cacheprovider", "-c", os.devnull, f"--junitxml={report}"]
    # One loop for all tests: LangChain keeps its connections over several models.
    loops = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"]
    with running_gateway(config, tmp_path) as gateway:
        subprocess.run(
            [str(clients / "python"), "-m", "pytest", "-q", *arguments, *loops, "langchain_standard.py"],
            cwd=tmp_path,
            env=os.environ | {"GATEWAY_URL": gateway.url},
            timeout=1200,
            check=False,
        )
    cases = {case.attrib["name"]: case for case in ElementTree.parse(report).iter("testcase")}
    failed = {
        name for name, case in cases.items() if case.find("failure") is not None or case.find("error") is not None
    }
    skipped = {name for name, case in cases.items() if case.find("skipped") is not None}
    assert failed == CANNOT.keys()
    assert len(cases) - len(failed) - len(skipped) >= 30
