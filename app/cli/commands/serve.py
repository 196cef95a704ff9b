"""``llama-gateway serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.options import Debug
from app.config import Settings, load_settings
from app.engine.flags import check_extra_args
from app.errors import ConfigError
from app.logs import configure_logging
from app.main import run, serve


def command(
    config: Annotated[Path | None, typer.Option(help="YAML file; see config.example.yaml.")] = None,
    model: Annotated[Path | None, typer.Option(help="A .gguf file to serve, with or without a configuration.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    debug: Debug = False,
) -> None:
    """Serve the models of a configuration, or a single model file."""
    configure_logging(verbose=debug)
    if config is None and model is None:
        raise ConfigError("Nothing to serve: give --model FILE.gguf or --config FILE.")

    def read_settings() -> Settings:
        settings = load_settings(config, model=model, check_flags=check_extra_args).listening_on(host=host, port=port)
        if not settings.models:
            raise ConfigError(f"{config} configures no models; add one below 'models:', or give --model FILE.gguf.")
        return settings

    settings = read_settings()
    reread = read_settings if config is not None else None
    run(lambda stop: serve(settings, stop, read_settings=reread, config_file=config))
