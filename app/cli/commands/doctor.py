"""``llama-gateway doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from app.cli.doctor import examine, report
from app.cli.options import Debug
from app.logs import configure_logging


def command(
    engine: Annotated[str, typer.Option(help="auto, embedded, or the path of a llama-server.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Look at engines, devices, CPU, memory and limits; name each problem and its cure."""
    configure_logging(verbose=debug, quiet=not debug)
    found = examine(engine)
    if as_json:
        typer.echo(json.dumps(found.document(), indent=2, ensure_ascii=False))
    else:
        for line in report(found):
            typer.echo(line)
    raise typer.Exit(1 if found.problems else 0)
