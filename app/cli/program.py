"""The program: finds the command that was called, imports that one only, and turns errors into exit codes.

To add a command, write ``app/cli/commands/NAME.py`` with a function ``command`` (or a Typer of that name, for commands
of its own) and give it a line in ``COMMANDS``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import typer

from app.errors import GatewayError, SetupError

# The first sentence of each command's docstring, so that --help need not import them.
COMMANDS = {
    "serve": "Serve the models of a configuration, or a single model file.",
    "demo": "Fetch a small model, serve it, ask it a question through the gateway's own API.",
    "plan": "Show how a model would be placed on this machine, or on one that you describe.",
    "check-config": "Check a configuration and the headers of its models; exit code 0 when it can be served.",
    "doctor": "Look at engines, devices, CPU, memory and limits; name each problem and its cure.",
    "keys": "API keys.",
    "top": "Show models, memory, speed and queue of a running gateway, live.",
    "version": "Print the version.",
}
Command = Callable[..., None] | typer.Typer

_ABOUT = "Point it at a GGUF file and it serves it."


def program(arguments: Sequence[str]) -> typer.Typer:
    """The commands, of which only the one that ``arguments`` call is more than its line in the help.

    The server's libraries take a second to import; a plan, an answer to ``--help`` or a misspelt option need none.
    """
    app = typer.Typer(
        name="llama-gateway", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_ABOUT
    )
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, line in COMMANDS.items():
        found = command_of(name) if name == called else _not_called
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name, help=line if found is _not_called else None)(found)
    return app


def command_of(name: str) -> Command:
    """What the file of a command defines."""
    command: Command = import_module(f"app.cli.commands.{name.replace('-', '_')}").command
    return command


def _not_called() -> None:
    """Stands for a command in the list of all."""


def main() -> None:
    """Run the command line; every error is a sentence, a traceback only with ``--debug``."""
    if sys.platform == "win32":
        _never_fail_to_print()
    try:
        program(sys.argv[1:])()
    except SetupError as error:
        _fail(error, error.exit_code)
    except GatewayError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _never_fail_to_print() -> None:
    """What goes to a file or a pipe is written in Windows' code page, which has no bars and few letters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(error: GatewayError, code: int) -> None:
    if "--debug" in sys.argv:
        raise error
    typer.echo(f"llama-gateway: {error}", err=True)
    sys.exit(code)
