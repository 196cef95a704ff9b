"""What a new configuration changes for the models: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.config import ModelConfig

# Whatever else differs is the gateway's own business and takes effect without another engine.
_OF_THE_ENGINE = (
    "path",
    "remote",
    "mmproj",
    "draft",
    "draft_head",
    "context",
    "parallel",
    "kv_cache",
    "kind",
    "gpu_layers",
    "cpu_moe_layers",
    "require_gpu",
    "extra_args",
    "keep_conversations_bytes",
)


@dataclass(frozen=True, slots=True)
class Changes:
    """Public names of models: new ones, removed ones, those that need another engine, those that only changed rules."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()
    adjusted: tuple[str, ...] = ()


def needs_new_engine(old: ModelConfig, new: ModelConfig) -> bool:
    """Whether an engine that was started for ``old`` cannot serve ``new``."""
    if any(getattr(old, name) != getattr(new, name) for name in _OF_THE_ENGINE):
        return True
    return new.context is None and old.default_context != new.default_context


def compare(old: Mapping[str, ModelConfig], new: Iterable[ModelConfig]) -> Changes:
    """What is to be done to get from ``old`` to ``new``."""
    wanted = {model.id: model for model in new}
    kept = [model for name, model in wanted.items() if name in old]
    restarted = tuple(model.id for model in kept if needs_new_engine(old[model.id], model))
    return Changes(
        added=tuple(name for name in wanted if name not in old),
        removed=tuple(name for name in old if name not in wanted),
        restarted=restarted,
        adjusted=tuple(model.id for model in kept if model != old[model.id] and model.id not in restarted),
    )
