"""``llama-gateway check-config``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.config import load_settings
from app.engine.flags import check_extra_args
from app.gguf import read_header


def command(file: Annotated[Path, typer.Argument(help="The configuration to check.")]) -> None:
    """Check a configuration and the headers of its models; exit code 0 when it can be served."""
    settings = load_settings(file, check_flags=check_extra_args)
    for entry in settings.models.values():
        if entry.path is not None:
            read_header(entry.path)
    typer.echo(f"{file}: valid; {len(settings.models)} models, {len(settings.keys)} keys.")
