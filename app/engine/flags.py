"""The engine's flags that we use, in every spelling they have had, and the ones an operator may add."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from app.errors import ConfigError, EngineUnusable


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: its spellings, newest first, and whether a server without it may be used at all."""

    spellings: tuple[str, ...]
    required: bool = False


# What we emit. A flag that is not required is left out where the binary's help does not list it: each of those came
# later than the behaviour that it controls, or only tunes.
FLAGS: dict[str, Flag] = {
    "model": Flag(("--model", "-m"), required=True),
    "alias": Flag(("--alias", "-a"), required=True),
    "host": Flag(("--host",), required=True),
    "port": Flag(("--port",), required=True),
    "api_key_file": Flag(("--api-key-file",), required=True),
    "context": Flag(("--ctx-size", "-c"), required=True),
    "parallel": Flag(("--parallel", "-np"), required=True),
    "batch": Flag(("--batch-size", "-b"), required=True),
    "ubatch": Flag(("--ubatch-size", "-ub"), required=True),
    "threads": Flag(("--threads", "-t"), required=True),
    "threads_batch": Flag(("--threads-batch", "-tb"), required=True),
    "gpu_layers": Flag(("--n-gpu-layers", "--gpu-layers", "-ngl"), required=True),
    "cpu_moe_layers": Flag(("--n-cpu-moe", "-ncmoe"), required=True),
    "tensor_split": Flag(("--tensor-split", "-ts"), required=True),
    "split_mode": Flag(("--split-mode", "-sm")),
    "device": Flag(("--device", "-dev")),
    "cache_type_k": Flag(("--cache-type-k", "-ctk"), required=True),
    "cache_type_v": Flag(("--cache-type-v", "-ctv"), required=True),
    "flash_attention": Flag(("--flash-attn", "-fa"), required=True),
    "unified_kv": Flag(("--kv-unified", "-kvu")),
    "split_kv": Flag(("--no-kv-unified", "-no-kvu")),
    "no_context_shift": Flag(("--no-context-shift",)),
    "fit": Flag(("--fit", "-fit")),
    "load_mode": Flag(("--load-mode", "-lm")),
    "no_mmap": Flag(("--no-mmap",)),
    "mlock": Flag(("--mlock",)),
    "cache_ram": Flag(("--cache-ram", "-cram")),
    "context_checkpoints": Flag(("--ctx-checkpoints", "-ctxcp", "--swa-checkpoints")),
    "mmproj": Flag(("--mmproj", "-mm"), required=True),
    "no_mmproj_offload": Flag(("--no-mmproj-offload",), required=True),
    "mmproj_device": Flag(("--mmproj-device", "-mmdev")),
    # Those of the draft were renamed in May 2026; until then its context was the model's largest unless told otherwise.
    "draft_model": Flag(("--spec-draft-model", "--model-draft", "-md"), required=True),
    "draft_tokens": Flag(("--spec-draft-n-max", "--draft-max", "--draft")),
    "draft_gpu_layers": Flag(("--spec-draft-ngl", "--gpu-layers-draft", "-ngld"), required=True),
    "draft_device": Flag(("--spec-draft-device", "--device-draft", "-devd")),
    "draft_context": Flag(("--ctx-size-draft", "-cd")),
    "draft_type": Flag(("--spec-type",)),
    "moe_cache": Flag(("--moe-cache-mib",)),
    "embedding": Flag(("--embedding", "--embeddings"), required=True),
    "pooling": Flag(("--pooling",), required=True),
    "reranking": Flag(("--reranking", "--rerank"), required=True),
    "metrics": Flag(("--metrics",)),
    "no_ui": Flag(("--no-ui", "--no-webui")),
    "sse_ping": Flag(("--sse-ping-interval",)),
    "timeout": Flag(("--timeout", "-to")),
    "cors_origins": Flag(("--cors-origins",)),
    "slot_save_path": Flag(("--slot-save-path",)),
    "verbosity": Flag(("--verbosity", "-lv", "--log-verbosity")),
}


@dataclass(slots=True)
class CommandLine:
    """Arguments in the words of one binary; ``known`` are the flags of its help, ``valued`` those that take a value."""

    known: Collection[str]
    valued: Collection[str]
    arguments: list[str] = field(default_factory=list)

    def spelling(self, name: str) -> str | None:
        """How this binary spells the flag, or None when it does not have it."""
        return next((spelling for spelling in FLAGS[name].spellings if spelling in self.known), None)

    def add(self, name: str, *values: str | int) -> bool:
        """Append the flag and its values; False when the binary lacks it, EngineUnusable when we cannot do without."""
        spelling = self.spelling(name)
        if spelling is None:
            if FLAGS[name].required:
                raise EngineUnusable(
                    f"This llama-server does not know {FLAGS[name].spellings[0]}: it is too old (or not llama-server); "
                    "install a build of August 2025 or later, or set engine.binary to `embedded`."
                )
            return False
        self.arguments += [spelling, *map(str, values)]
        return True

    def flash_attention(self, *, on: bool) -> None:
        """``--flash-attn on|off``; before September 2025 a bare switch that was off when absent."""
        spelling = self.spelling("flash_attention")
        if spelling is None or spelling in self.valued:
            self.add("flash_attention", "on" if on else "off")
        elif on:
            self.add("flash_attention")

    def load_mode(self, mode: str) -> None:
        """``--load-mode``; before July 2026 the pair ``--no-mmap`` and ``--mlock``."""
        if self.add("load_mode", mode):
            return
        if mode in {"none", "mlock"}:
            self.add("no_mmap")
        if mode in {"mlock", "mmap+mlock"}:
            self.add("mlock")


# What `extra_args` may hold, with the number of values that follow. It tunes answers and speed; nothing here opens a
# port or a file tree, names another model, or moves memory that the planner has counted.
_ALLOWED_EXTRA: dict[str, int] = {
    **dict.fromkeys(
        (
            "--jinja", "--no-jinja", "--special", "--spm-infill", "--escape", "--no-escape", "--ignore-eos",
            "--warmup", "--no-warmup", "--perf", "--no-perf", "--check-tensors", "--cache-prompt", "--no-cache-prompt",
            "--prefill-assistant", "--no-prefill-assistant", "--skip-chat-parsing", "--no-skip-chat-parsing",
            "--reasoning-preserve", "--no-reasoning-preserve", "--op-offload", "--no-op-offload",
            "--cont-batching", "--no-cont-batching", "--cache-idle-slots", "--no-cache-idle-slots",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "--chat-template", "--chat-template-file", "--chat-template-kwargs", "--reasoning-format", "--reasoning",
            "--reasoning-effort", "--reasoning-budget", "--reasoning-budget-message", "--pooling", "--embd-normalize",
            "--samplers", "--sampler-seq", "--sampling-seq", "--seed", "--temp", "--temperature", "--top-k", "--top-p",
            "--min-p", "--top-nsigma", "--top-n-sigma", "--xtc-probability", "--xtc-threshold", "--typical",
            "--typical-p", "--repeat-last-n", "--repeat-penalty", "--presence-penalty", "--frequency-penalty",
            "--dry-multiplier", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n",
            "--dry-sequence-breaker", "--dynatemp-range", "--dynatemp-exp", "--mirostat", "--mirostat-lr",
            "--mirostat-ent", "--logit-bias", "--rope-scaling", "--rope-scale", "--rope-freq-base",
            "--rope-freq-scale", "--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow",
            "--yarn-beta-fast", "--override-kv", "--lora", "--lora-scaled", "--control-vector",
            "--control-vector-scaled", "--numa", "--cpu-mask", "--cpu-range", "--cpu-strict", "--prio", "--poll",
            "--cpu-mask-batch", "--cpu-range-batch", "--cpu-strict-batch", "--prio-batch", "--poll-batch",
            "--threads-http", "--cache-reuse", "--slot-prompt-similarity", "--checkpoint-min-step", "--lazy-mode",
            "--image-min-tokens", "--image-max-tokens", "--mtmd-batch-max-tokens",
        ),
        1,
    ),
    "--control-vector-layer-range": 2,
}  # fmt: skip

# The key of the configuration that sets what this flag would.
_CONFIGURED_BY: dict[str, str] = {
    **dict.fromkeys(("-m", "--model"), "path"),
    **dict.fromkeys(("-a", "--alias"), "aliases"),
    **dict.fromkeys(("-c", "--ctx-size"), "context"),
    **dict.fromkeys(("-np", "--parallel"), "parallel"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "kv_cache"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), "offload: {gpu_layers: N}"),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe"), "offload: {cpu_moe_layers: N}"),
    **dict.fromkeys(("-mm", "--mmproj"), "mmproj"),
    **dict.fromkeys(("-md", "--model-draft", "--spec-draft-model"), "draft"),
    **dict.fromkeys(("--embedding", "--embeddings"), "kind: embedding"),
    **dict.fromkeys(("--rerank", "--reranking"), "kind: rerank"),
}


def check_extra_args(arguments: Sequence[str]) -> tuple[str, ...]:
    """The operator's own engine flags, or ConfigError that names the first one which is not allowed."""
    return tuple(argument for group in _groups(arguments) for argument in group)


def extra_flags(arguments: Sequence[str]) -> tuple[str, ...]:
    """Only the flags among checked ``extra_args``, without their values."""
    return tuple(group[0] for group in _groups(arguments))


def _groups(arguments: Sequence[str]) -> Iterator[tuple[str, ...]]:
    rest = list(map(str, arguments))
    while rest:
        # llama-server reads --api_key as --api-key, so what is checked is what it will read.
        flag = rest[0].replace("_", "-") if rest[0].startswith("--") else rest[0]
        count = _ALLOWED_EXTRA.get(flag)
        if count is None:
            raise ConfigError(f"extra_args may not contain {_shown(rest[0])}: {_cure(flag)}.")
        if len(rest) <= count:
            raise ConfigError(f"extra_args: {flag} needs {count} value(s) after it; add what is missing.")
        yield (flag, *rest[1 : 1 + count])
        del rest[: 1 + count]


def _cure(flag: str) -> str:
    if flag in _CONFIGURED_BY:
        return f"the gateway sets it; use `{_CONFIGURED_BY[flag]}` of the model instead"
    if "=" in flag:
        return "llama-server takes a flag and its value as two arguments"
    return "it is not among the engine flags that are safe to set by hand; remove it"


def _shown(argument: str) -> str:
    # A secret could follow an "=" (--api-key=…): an error message ends up in a log.
    return argument.partition("=")[0][:80]
