"""``llama-gateway keys``."""

from __future__ import annotations

from typing import Annotated

import typer

from app.credential import new_key

command = typer.Typer(no_args_is_help=True, help="API keys.")


@command.command("new")
def new(name: Annotated[str, typer.Argument(help="Whose key it is.")]) -> None:
    """Print a new key once, and the line with its hash for the configuration."""
    key, hashed = new_key()
    typer.echo(f"key (shown only now): {key}")
    typer.echo(f'for the configuration, below "keys:":\n  - {{name: {name}, hash: "{hashed}", models: ["*"]}}')
