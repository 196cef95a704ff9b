"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]
