"""What the configuration asks of the planner, and what a plan gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from app.config import MemoryConfig, ModelConfig
from app.gguf import Kind, ModelFacts, natural_kind, needed_pooling, read_header, read_projector
from app.offload import OffloadPlan, Wish


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of a model say: the model's own, and those of its projector and draft model where it has them."""

    facts: ModelFacts
    mmproj: ModelFacts | None = None
    draft: ModelFacts | None = None

    @classmethod
    def read(cls, model: ModelConfig) -> ModelFiles:
        """Read their headers; raises ModelFileError."""
        return cls(
            read_header(model.file),
            None if model.mmproj is None else read_projector(model.mmproj),
            None if model.draft is None else read_header(model.draft),
        )


def wish_for(model: ModelConfig, memory: MemoryConfig, facts: ModelFacts) -> Wish:
    """What the configuration asks of the planner."""
    kind = kind_of(model, facts)
    return Wish(
        context=requested_context(model, facts),
        parallel=model.parallel,
        kv_cache=model.kv_cache,
        gpu_layers=model.gpu_layers,
        cpu_moe_layers=model.cpu_moe_layers,
        vram_reserve_bytes=int(memory.vram_reserve),
        ram_reserve_bytes=int(memory.ram_reserve),
        require_gpu=model.require_gpu,
        draft_head=model.draft_head,
        embedding=kind is not Kind.CHAT,
        pooling=needed_pooling(kind, facts),
        allow_smaller_context=model.allow_smaller_context,
    )


def kind_of(model: ModelConfig, facts: ModelFacts | None) -> Kind:
    """What the model is for: as configured, else what its file says; one that another server has is for chat."""
    if model.kind != "auto":
        return Kind(model.kind)
    return Kind.CHAT if facts is None else natural_kind(facts)


def requested_context(model: ModelConfig, facts: ModelFacts) -> int:
    """Tokens per request: as configured, else the default as far as the model was trained for it."""
    if model.context is not None:
        return model.context
    return min(model.default_context, facts.context_trained or model.default_context)


def planned_parts(plan: OffloadPlan) -> Iterator[tuple[str, str, int]]:
    """(device, part, bytes) of everything that the plan gives memory to; RAM is the device ``host``."""
    ledgers = [(ledger.name, asdict(ledger)) for ledger in plan.memory.devices]
    for device, parts in [*ledgers, ("host", asdict(plan.memory.host))]:
        for part, size_bytes in parts.items():
            if part.endswith("_bytes") and size_bytes:
                yield device, part.removesuffix("_bytes"), size_bytes
