"""A plan in the words of one llama-server: the argument vector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.engine.binary import EngineBinary
from app.engine.endpoint import Endpoint
from app.engine.environment import child_environment
from app.engine.flags import FLAGS, CommandLine, check_extra_args, extra_flags
from app.errors import ConfigError, EngineUnusable
from app.offload import OffloadPlan

__all__ = ["Endpoint", "build_argv", "child_environment", "shares_cells"]

# Nobody can own this origin, so no page is ever let in; an empty list would mean "everybody".
_NO_ORIGIN = "https://gateway.invalid"
_SSE_PING_SECONDS = 15
_IO_TIMEOUT_SECONDS = 3600
# libllama's own lines (buffer sizes, offloaded layers) appear from level 4 on.
_VERBOSITY = 4


def build_argv(
    plan: OffloadPlan,
    engine: EngineBinary,
    *,
    alias: str,
    endpoint: Endpoint,
    key_file: Path | None,
    extra_args: Sequence[str] = (),
    slot_save_path: Path | None = None,
) -> tuple[str, ...]:
    """The command that starts ``engine`` with exactly this plan.

    Everything that places memory is explicit, so that the engine's ``--fit`` never decides. Without ``key_file``
    it is a command to show, not to run. Raises EngineUnusable when the binary lacks a flag we cannot do without,
    ConfigError for an ``extra_args`` that is not allowed.
    """
    line = CommandLine(known=engine.flags, valued=engine.valued_flags)
    line.add("model", str(plan.model.path))
    line.add("alias", alias)
    _add_listener(line, endpoint, key_file)
    _add_placement(line, plan)
    _add_context(line, plan, engine)
    _add_mmproj(line, plan)
    _add_draft(line, plan)
    _add_kind(line, plan)
    if slot_save_path is not None:
        line.add("slot_save_path", str(slot_save_path))
    return (*engine.command, *line.arguments, *_extra(engine, extra_args))


def knows_moe_cache(engine: EngineBinary) -> bool:
    """Whether this engine can keep some of the experts that are in RAM on a device."""
    return not engine.flags.isdisjoint(FLAGS["moe_cache"].spellings)


def _add_listener(line: CommandLine, endpoint: Endpoint, key_file: Path | None) -> None:
    if endpoint.socket is not None:
        line.add("host", str(endpoint.socket))
    else:
        line.add("host", "127.0.0.1")
        line.add("port", str(endpoint.port))
    if key_file is not None:
        line.add("api_key_file", str(key_file))
    line.add("cors_origins", _NO_ORIGIN)
    line.add("timeout", _IO_TIMEOUT_SECONDS)
    line.add("sse_ping", _SSE_PING_SECONDS)
    line.add("metrics")
    line.add("no_ui")
    line.add("verbosity", _VERBOSITY)


def _add_placement(line: CommandLine, plan: OffloadPlan) -> None:
    placement = plan.placement
    line.add("fit", "off")
    line.add("device", _devices(plan))
    line.add("gpu_layers", placement.gpu_layers)
    if placement.cpu_moe_layers:
        line.add("cpu_moe_layers", placement.cpu_moe_layers)
    if placement.moe_cache_mib:
        line.add("moe_cache", placement.moe_cache_mib)
    if len(placement.tensor_split) > 1:
        line.add("split_mode", "layer")
        line.add("tensor_split", ",".join(f"{share:g}" for share in placement.tensor_split))
    line.load_mode(placement.load_mode)
    line.add("threads", placement.threads)
    line.add("threads_batch", placement.threads)


def _devices(plan: OffloadPlan) -> str:
    placement = plan.placement
    in_use = placement.gpu_layers > 0 or not {placement.mmproj_on, placement.draft_on} <= {None, "host"}
    names = ",".join(device.name for device in plan.machine.devices)
    return names if in_use and names else "none"


def _add_context(line: CommandLine, plan: OffloadPlan, engine: EngineBinary) -> None:
    placement = plan.placement
    line.add("context", placement.context_per_request * placement.parallel)
    line.add("parallel", placement.parallel)
    line.add(_cache_layout(plan, engine))
    line.add("no_context_shift")
    line.add("cache_type_k", placement.kv_cache_k.value)
    line.add("cache_type_v", placement.kv_cache_v.value)
    line.flash_attention(on=placement.flash_attention)
    line.add("batch", placement.batch)
    line.add("ubatch", placement.ubatch)
    line.add("cache_ram", placement.cache_ram_mib)
    line.add("context_checkpoints", placement.context_checkpoints)


def _add_mmproj(line: CommandLine, plan: OffloadPlan) -> None:
    if plan.mmproj is None:
        return
    line.add("mmproj", str(plan.mmproj.path))
    where = plan.placement.mmproj_on
    if where in {None, "host"}:
        line.add("no_mmproj_offload")
    elif where is not None and len(plan.machine.devices) > 1:
        line.add("mmproj_device", where)


def _add_draft(line: CommandLine, plan: OffloadPlan) -> None:
    placement = plan.placement
    if not placement.draft_tokens:
        return
    wanted = "draft_type" if placement.draft_head else "draft_model"
    if line.spelling(wanted) is None:
        raise EngineUnusable(
            "This engine cannot guess ahead with a draft: take `draft` away from the model, or set engine.binary to a "
            "llama-server of June 2026 or later."
        )
    line.add("draft_tokens", placement.draft_tokens)
    # Without a type new engines do not guess at all, and old ones know only draft models.
    line.add("draft_type", "draft-mtp" if placement.draft_head else "draft-simple")
    if plan.draft is None:
        return
    on_device = placement.draft_on not in {None, "host"}
    line.add("draft_model", str(plan.draft.path))
    line.add("draft_gpu_layers", plan.draft.layers + 1 if on_device else 0)
    line.add("draft_device", (placement.draft_on or "none") if on_device else "none")
    line.add("draft_context", placement.context_per_request * placement.parallel)


def _cache_layout(plan: OffloadPlan, engine: EngineBinary) -> str:
    """Each slot its own cells: in a shared pool one overflow ends every running request.

    Not for embeddings on the embedded engine: its build mixes up texts of several slots that share a batch (measured:
    a cosine of 0.83 to the right vector), and in a pool it does not. No text is longer than its share there.
    """
    return "unified_kv" if plan.wish.embedding and engine.kind == "embedded" else "split_kv"


def shares_cells(argv: Sequence[str]) -> bool:
    """Whether an engine started so has one pool of cells for all its slots."""
    return not set(FLAGS["unified_kv"].spellings).isdisjoint(argv)


def _add_kind(line: CommandLine, plan: OffloadPlan) -> None:
    if not plan.wish.embedding:
        return
    if plan.wish.pooling == "rank":
        line.add("reranking")
        return
    line.add("embedding")
    if plan.wish.pooling is not None:
        line.add("pooling", plan.wish.pooling)


def _extra(engine: EngineBinary, extra_args: Sequence[str]) -> tuple[str, ...]:
    checked = check_extra_args(extra_args)
    for flag in extra_flags(checked):
        if flag not in engine.flags:
            raise ConfigError(
                f"extra_args contains {flag}, which this engine ({engine.version}) does not know; "
                "remove it or use another llama-server."
            )
    return checked
