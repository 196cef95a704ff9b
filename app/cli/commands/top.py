"""``llama-gateway top``."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.options import Debug
from app.cli.top import Top
from app.logs import configure_logging


def command(
    url: Annotated[str, typer.Option(help="Where the gateway is.")] = "http://127.0.0.1:8080",
    key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable that holds an admin key.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line per look.")] = False,
    debug: Debug = False,
) -> None:
    """Show models, memory, speed and queue of a running gateway, live."""
    configure_logging(verbose=debug, quiet=not debug)
    with Top(url, key_env=key_env) as top:
        top.run(once=once, as_json=as_json)
