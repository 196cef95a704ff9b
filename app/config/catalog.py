"""Names and aliases → model, with every default filled in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.config.settings import Defaults, FixedOffload, KVCache, ModelEntry, ModelKind, OnOverflow, Settings
from app.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """An OpenAI-compatible server elsewhere that answers for a model.

    ``url`` goes up to ``/v1``; ``key_env`` names the environment variable with the key; ``model`` is the model's name
    there, None to find it out; ``tokenizer`` is a model file whose vocabulary estimates prompts.
    """

    url: str
    key_env: str | None = None
    model: str | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model with every default filled in: ``path`` is its file, or ``remote`` the server that has it.

    ``context`` is what each request may use, in tokens; None leaves it to the smaller of ``default_context`` and the
    context that the model was trained for. ``idle_unload_seconds`` is None for a model that stays.
    """

    id: str
    path: Path | None
    aliases: tuple[str, ...]
    context: int | None
    default_context: int
    parallel: int
    max_tokens: int
    on_overflow: OnOverflow
    max_queue: int
    kv_cache: KVCache
    gpu_layers: int | None
    cpu_moe_layers: int | None
    require_gpu: bool
    extra_args: tuple[str, ...]
    mmproj: Path | None = None
    draft: Path | None = None
    draft_head: bool = False
    kind: ModelKind = "auto"
    allow_smaller_context: bool = False
    round_prompt_times: bool = False
    idle_unload_seconds: float | None = None
    pin: bool = False
    preload: bool = False
    max_tokens_ceiling: int | None = None
    max_queue_per_key: int | None = None
    max_wait_seconds: float | None = None
    long_prompt_tokens: int = 8192
    long_prefills: int = 1
    remote: RemoteServer | None = None
    keep_conversations_bytes: int | None = None

    @property
    def file(self) -> Path:
        """The file of a model of ours; raises ValueError for one elsewhere."""
        if self.path is None:
            raise ValueError(f"the model {self.id!r} has no file")
        return self.path


class ModelCatalog:
    """Names and aliases → model; ``default_model`` is the public name of the one that comes back when all is idle."""

    def __init__(self, settings: Settings) -> None:
        self._models = {name: _complete(name, entry, settings.defaults) for name, entry in settings.models.items()}
        self._names = {name: name for name in self._models}
        for model in self._models.values():
            self._names |= dict.fromkeys(model.aliases, model.id)
        self.default_model = self._names.get(settings.default_model or "")

    def __iter__(self) -> Iterator[ModelConfig]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def resolve(self, name: str) -> ModelConfig:
        """The model of this name or alias; raises ModelNotFound."""
        try:
            return self._models[self._names[name]]
        except KeyError:
            raise ModelNotFound(
                f"The model {name[:200]!r} does not exist; this gateway has: {', '.join(self._models) or 'none'}.",
                param="model",
            ) from None


def _complete(name: str, entry: ModelEntry, defaults: Defaults) -> ModelConfig:
    fixed = entry.offload or FixedOffload.model_construct()
    return ModelConfig(
        id=name,
        path=entry.path,
        mmproj=entry.mmproj,
        draft=entry.draft if isinstance(entry.draft, Path) else None,
        draft_head=entry.draft == "head",
        aliases=entry.aliases,
        context=entry.context,
        default_context=defaults.context,
        parallel=entry.parallel or defaults.parallel,
        max_tokens=entry.max_tokens or defaults.max_tokens,
        on_overflow=entry.on_overflow or defaults.on_overflow,
        max_queue=defaults.max_queue if entry.max_queue is None else entry.max_queue,
        kv_cache=entry.kv_cache,
        kind=entry.kind,
        gpu_layers=fixed.gpu_layers,
        cpu_moe_layers=fixed.cpu_moe_layers,
        require_gpu=entry.require_gpu,
        allow_smaller_context=entry.allow_smaller_context,
        round_prompt_times=entry.round_prompt_times,
        extra_args=entry.extra_args,
        idle_unload_seconds=_idle_unload(entry, defaults),
        pin=entry.pin,
        preload=entry.preload,
        max_tokens_ceiling=entry.max_tokens_ceiling or defaults.max_tokens_ceiling,
        max_queue_per_key=defaults.max_queue_per_key,
        max_wait_seconds=defaults.max_wait,
        long_prompt_tokens=defaults.long_prompt,
        long_prefills=defaults.long_prefills,
        keep_conversations_bytes=None if entry.keep_conversations is None else int(entry.keep_conversations),
        remote=None if entry.url is None else _remote(entry.url, entry),
    )


def _remote(url: str, entry: ModelEntry) -> RemoteServer:
    return RemoteServer(url=url, key_env=entry.key_env, model=entry.remote_model, tokenizer=entry.tokenizer)


def _idle_unload(entry: ModelEntry, defaults: Defaults) -> float | None:
    seconds = defaults.idle_unload if entry.idle_unload is None else entry.idle_unload
    return None if math.isinf(seconds) else seconds
