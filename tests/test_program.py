"""The program imports the command that was called and nothing else: a plan does not wait for a web server."""

from __future__ import annotations

import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import pytest
import typer

from app.cli import commands
from app.cli.program import COMMANDS, command_of

_SERVER = {"aiohttp", "asyncio", "fastapi", "httpx", "prometheus_client", "starlette", "uvicorn", "xllamacpp"}
# What a gateway loads when the first request, model or person needs it: it stays in memory from then on.
_SELDOM = {"httpx", "imagesize", "jinja2", "jsonschema_rs", "pygments", "pynvml", "redis", "rich", "tiktoken"}
_SETTINGS = {"pydantic", "pydantic_settings", "yaml"}

# Arguments → what they must not import.
_LIGHT = {
    "plan": (["plan", "model.gguf"], _SERVER | _SETTINGS | {"rich"}),
    "keys": (["keys", "new", "alice"], _SERVER | _SETTINGS | {"rich", "psutil"}),
    "version": (["version"], _SERVER | _SETTINGS | {"rich", "psutil"}),
    "doctor": (["doctor"], _SERVER | _SETTINGS | {"rich"}),
    "help": (["--help"], _SERVER | _SETTINGS | {"psutil"}),
    "serve": (["serve", "--model", "model.gguf"], _SELDOM),
    "check-config": (["check-config", "config.yaml"], _SERVER - {"asyncio"}),
}


def imported(*arguments: str) -> set[str]:
    """Top-level modules of a fresh interpreter that has built the program for these arguments."""
    code = "import sys; from app.cli.program import program; program(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("name", _LIGHT)
def test_a_light_command_imports_no_heavy_library(name: str) -> None:
    arguments, forbidden = _LIGHT[name]
    assert imported(*arguments) & forbidden == set()


def test_serving_does_import_them() -> None:
    assert {"fastapi", "aiohttp", "pydantic"} <= imported("serve")


def test_every_file_is_a_command_and_every_command_a_file() -> None:
    files = {path.stem.replace("_", "-") for path in Path(commands.__path__[0]).glob("[a-z]*.py")}
    assert files == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    command = command_of(name)
    text = command.info.help if isinstance(command, typer.Typer) else command.__doc__
    assert cleandoc(text or "").partition("\n\n")[0].replace("\n", " ") == COMMANDS[name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["plam"], "Did you mean 'plan'?"), (["--plan"], "No such option"), (["plan", "--vrma", "1"], "--vrma")],
)
def test_what_is_misspelt_is_named(arguments: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "app", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
