"""The command line: arguments in, exit code out."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from app import __version__
from app.auth import new_key
from app.cli.demo import Demo
from app.cli.plan import PlanRequest, print_plan
from app.config import Settings, load_settings
from app.engine.flags import check_extra_args
from app.errors import ConfigError, GatewayError, SetupError
from app.gguf import read_header
from app.logs import configure_logging
from app.main import run, serve

app = typer.Typer(
    name="llama-gateway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Point it at a GGUF file and it serves it.",
)
keys = typer.Typer(no_args_is_help=True, help="API keys.")
app.add_typer(keys, name="keys")

_Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]


@app.command("serve")
def serve_command(
    config: Annotated[Path | None, typer.Option(help="YAML file; see config.example.yaml.")] = None,
    model: Annotated[Path | None, typer.Option(help="A .gguf file to serve, with or without a configuration.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    debug: _Debug = False,
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
    run(lambda stop: serve(settings, stop, read_settings=read_settings if config is not None else None))


@app.command("demo")
def demo_command(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; by default 8080 or, if taken, a free one.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop after the first answer.")] = False,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Why is the sky blue? Answer in two sentences.",
    engine: Annotated[str, typer.Option(help="auto, embedded, or the path of a llama-server.")] = "auto",
    debug: _Debug = False,
) -> None:
    """Fetch a small model, serve it, ask it a question through the gateway's own API."""
    configure_logging(verbose=debug, quiet=not debug)
    run(Demo(port=port, once=once, prompt=prompt, engine=engine).run)


@app.command("plan")
def plan_command(
    file: Annotated[Path, typer.Argument(help="The .gguf file; any shard of a split one.")],
    mmproj: Annotated[Path | None, typer.Option(help="Projector for images.")] = None,
    vram: Annotated[
        str | None, typer.Option(help="Free memory of each device, like 8GiB or 8GiB,24GiB; 0 for none.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Free RAM, like 32GiB.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens that each request may use.")] = None,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Requests answered at once.")] = 1,
    kv_cache: Annotated[str, typer.Option(help="auto, f16, q8_0 or q4_0.")] = "auto",
    gpu_layers: Annotated[int | None, typer.Option(min=0, help="Exactly so many layers on devices.")] = None,
    cpu_moe_layers: Annotated[int | None, typer.Option(min=0, help="Experts of exactly so many layers in RAM.")] = None,
    engine: Annotated[str, typer.Option(help="auto, embedded, or the path of a llama-server.")] = "auto",
    verify: Annotated[bool, typer.Option("--verify", help="Have the engine count it; loads nothing.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Reasons, the memory as a table and as bars.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
    debug: _Debug = False,
) -> None:
    """Show how a model would be placed on this machine, or on one that you describe."""
    configure_logging(verbose=debug, quiet=not debug)
    request = PlanRequest(
        file=file,
        mmproj=mmproj,
        vram=vram,
        ram=ram,
        context=context,
        parallel=parallel,
        kv_cache=kv_cache,
        engine=engine,
        gpu_layers=gpu_layers,
        cpu_moe_layers=cpu_moe_layers,
        verify=verify,
        explain=explain,
    )
    print_plan(request, as_json=as_json)


@app.command("check-config")
def check_config_command(file: Annotated[Path, typer.Argument(help="The configuration to check.")]) -> None:
    """Check a configuration and the headers of its models; exit code 0 when it can be served."""
    settings = load_settings(file, check_flags=check_extra_args)
    for entry in settings.models.values():
        read_header(entry.path)
    typer.echo(f"{file}: valid; {len(settings.models)} models, {len(settings.keys)} keys.")


@keys.command("new")
def new_key_command(name: Annotated[str, typer.Argument(help="Whose key it is.")]) -> None:
    """Print a new key once, and the line with its hash for the configuration."""
    key, hashed = new_key()
    typer.echo(f"key (shown only now): {key}")
    typer.echo(f'for the configuration, below "keys:":\n  - {{name: {name}, hash: "{hashed}", models: ["*"]}}')


@app.command("version")
def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line; every error is a sentence, a traceback only with ``--debug``."""
    try:
        app()
    except SetupError as error:
        _fail(error, error.exit_code)
    except GatewayError as error:
        _fail(error, 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


def _fail(error: GatewayError, code: int) -> None:
    if "--debug" in sys.argv:
        raise error
    typer.echo(f"llama-gateway: {error}", err=True)
    sys.exit(code)
