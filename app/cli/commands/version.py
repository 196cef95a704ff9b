"""``llama-gateway version``."""

from __future__ import annotations

import typer

from app import __version__


def command() -> None:
    """Print the version."""
    typer.echo(__version__)
