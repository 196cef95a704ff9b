"""``llama-gateway plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.options import Debug
from app.cli.plan import PlanRequest, print_plan
from app.logs import configure_logging


def command(
    file: Annotated[Path, typer.Argument(help="The .gguf file; any shard of a split one.")],
    mmproj: Annotated[Path | None, typer.Option(help="Projector for images.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="A small model that guesses ahead, or `head` for the model's own draft head.")
    ] = None,
    vram: Annotated[
        str | None, typer.Option(help="Free memory of each device, like 8GiB or 8GiB,24GiB; 0 for none.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Free RAM, like 32GiB.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens that each request may use.")] = None,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Requests answered at once.")] = 1,
    kv_cache: Annotated[str, typer.Option(help="auto, f16, q8_0 or q4_0.")] = "auto",
    kind: Annotated[str, typer.Option(help="auto (as the file says), chat, embedding or rerank.")] = "auto",
    gpu_layers: Annotated[int | None, typer.Option(min=0, help="Exactly so many layers on devices.")] = None,
    cpu_moe_layers: Annotated[int | None, typer.Option(min=0, help="Experts of exactly so many layers in RAM.")] = None,
    engine: Annotated[str, typer.Option(help="auto, embedded, or the path of a llama-server.")] = "auto",
    verify: Annotated[bool, typer.Option("--verify", help="Have the engine count it; loads nothing.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Reasons, the memory as a table and as bars.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show how a model would be placed on this machine, or on one that you describe."""
    configure_logging(verbose=debug, quiet=not debug)
    request = PlanRequest(
        file=file,
        mmproj=mmproj,
        draft=draft,
        vram=vram,
        ram=ram,
        context=context,
        parallel=parallel,
        kv_cache=kv_cache,
        kind=kind,
        engine=engine,
        gpu_layers=gpu_layers,
        cpu_moe_layers=cpu_moe_layers,
        verify=verify,
        explain=explain,
    )
    print_plan(request, as_json=as_json)
