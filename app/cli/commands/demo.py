"""``llama-gateway demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.demo import Demo
from app.cli.options import Debug
from app.logs import configure_logging
from app.main import run


def command(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; by default 8080 or, if taken, a free one.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop after the first answer.")] = False,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Why is the sky blue? Answer in two sentences.",
    engine: Annotated[str, typer.Option(help="auto, embedded, or the path of a llama-server.")] = "auto",
    debug: Debug = False,
) -> None:
    """Fetch a small model, serve it, ask it a question through the gateway's own API."""
    configure_logging(verbose=debug, quiet=not debug)
    run(Demo(port=port, once=once, prompt=prompt, engine=engine).run)
