"""The commands, one file each."""

from app.cli.commands import app, main

__all__ = ["app", "main"]
