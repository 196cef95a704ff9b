"""llama-server's command line on the native server inside xllamacpp.

A child process of its own, started by path; needs the standard library and xllamacpp, nothing else of this package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xllamacpp

_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT]
if sys.platform == "win32":
    _STOP_SIGNALS.append(signal.SIGBREAK)
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"

Params = Any  # xllamacpp.CommonParams: a native class without type information
Apply = Callable[[Params, str], None]


class UsageError(Exception):
    """The command line cannot be read."""


@dataclass(frozen=True, slots=True)
class Option:
    """One flag: all of its names, the hint for its value (empty for a switch) and what it does to the parameters."""

    names: tuple[str, ...]
    hint: str
    help: str
    apply: Apply


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, serve until SIGTERM or SIGINT (on Windows Ctrl+Break), return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--version" in arguments:
        return _print_version()
    if any(flag in arguments for flag in ("-h", "--help", "--usage")):
        return _print_help()
    if "--list-devices" in arguments:
        return _print_devices()
    try:
        params = parse(arguments)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return _serve(params)


def parse(arguments: Sequence[str]) -> Params:
    """The engine's parameters for a command line; raises UsageError in llama-server's words."""
    params = xllamacpp.CommonParams()
    params.port = 9931
    table = {name: option for option in OPTIONS for name in option.names}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        option = table.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if option is None:
            raise UsageError(f"error: invalid argument: {flag}")
        if option.hint and not rest:
            raise UsageError(f'error while handling argument "{flag}": expected value for argument')
        try:
            option.apply(params, rest.pop(0) if option.hint else "")
        except (ValueError, OSError) as error:
            raise UsageError(f'error while handling argument "{flag}": {error}') from error
    if not params.model.path:
        raise UsageError("error: --model is required")
    return params


def _serve(params: Params) -> int:
    _die_with_parent()
    # While the model loads, xllamacpp holds the interpreter: no Python handler would run, so the kernel's default must.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _wait_for_stop()
    for host in params.hostnames:
        if host.endswith(".sock"):
            Path(host).unlink(missing_ok=True)
    sys.stderr.flush()
    # The destructor of `server` waits for open streams, up to a ping interval, and nothing can interrupt it there.
    os._exit(0 if server is not None else 1)


def _wait_for_stop() -> None:
    reader, writer = os.pipe()
    if sys.platform != "win32":
        os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    # Written to by the C part of the handler, in whichever thread the signal lands; os.read itself resumes after EINTR.
    os.read(reader, 1)


def _die_with_parent() -> None:
    # On Windows the job that our parent is in sees to it.
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # It may have died before the kernel knew of our wish.
        if os.getppid() != parent:
            os._exit(1)


# --- what the flags do -----------------------------------------------------------------------------------------------


def _set(attribute: str, convert: Callable[[str], Any] = str) -> Apply:
    def apply(params: Params, value: str) -> None:
        *path, last = attribute.split(".")
        target = params
        for part in path:
            target = getattr(target, part)
        setattr(target, last, convert(value))

    return apply


def _constant(attribute: str, value: Any) -> Apply:
    return _set(attribute, lambda _: value)


def _one_of(names: Sequence[str], enum: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(value: str) -> Any:
        if value not in names:
            raise ValueError(f"unknown value: {value} (allowed: {', '.join(names)})")
        return enum(value)

    return convert


def _member(enum: Any, prefix: str) -> Callable[[str], Any]:
    return lambda value: getattr(enum, prefix + value.upper().replace("+", "_"))


def _load_mode(value: str) -> Any:
    return _member(xllamacpp.llama_load_mode, "LLAMA_LOAD_MODE_")("direct_io" if value == "dio" else value)


def _flash_attention(value: str) -> Any:
    name = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[value]
    return getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{name}")


def _switched(value: str) -> bool:
    return bool(_one_of(("on", "off"), lambda word: word == "on")(value))


def _layers(value: str) -> int:
    return {"auto": -1, "all": 999}.get(value) or int(value)


def _device(params: Params, value: str) -> None:
    names = [device["name"] for device in _devices()]
    if value == "none":
        params.n_gpu_layers = 0
        params.no_kv_offload = True
        params.no_op_offload = True
    elif value.split(",") != names:
        raise ValueError(f"the embedded engine uses all of its devices or none: {', '.join(names) or 'none'}")


def _gpu_layers(params: Params, value: str) -> None:
    params.n_gpu_layers = _layers(value)


def _cpu_moe(params: Params, value: str) -> None:
    params.tensor_buft_overrides = ",".join(rf"blk\.{layer}{_EXPERTS}" for layer in range(int(value)))


def _tensor_split(params: Params, value: str) -> None:
    shares = [float(share) for share in value.split(",")]
    params.tensor_split = shares + [0.0] * (len(params.tensor_split) - len(shares))


def _cors_origins(params: Params, value: str) -> None:
    params.cors_origins = value
    params.cors_origins_explicit = True


def _timeout(params: Params, value: str) -> None:
    params.timeout_read = params.timeout_write = int(value)


def _rerank(params: Params, _: str) -> None:
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK


def _key_lines(value: str) -> list[str]:
    lines = Path(value).read_text(encoding="utf-8").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ValueError("the file holds no key")
    return keys


_KV = _one_of(_KV_TYPES, _member(xllamacpp.ggml_type, "GGML_TYPE_"))
_POOLING = _one_of(
    ("none", "mean", "cls", "last", "rank"), _member(xllamacpp.llama_pooling_type, "LLAMA_POOLING_TYPE_")
)
_SPLIT = _one_of(("none", "layer", "row", "tensor"), _member(xllamacpp.llama_split_mode, "LLAMA_SPLIT_MODE_"))

OPTIONS: tuple[Option, ...] = (
    Option(("-m", "--model"), "FNAME", "model path to load", _set("model.path")),
    Option(("-a", "--alias"), "STRING", "model name of the API", _set("model_alias", lambda value: {value})),
    Option(("--host",), "HOST", "IP address, or UNIX socket path ending in .sock", _set("hostnames", lambda v: [v])),
    Option(("--port",), "PORT", "port to listen on (default: 9931)", _set("port", int)),
    Option(("--api-key-file",), "FNAME", "file of API keys, one per line", _set("api_keys", _key_lines)),
    Option(("--slot-save-path",), "PATH", "folder of saved slots", _set("slot_save_path", lambda path: f"{path}/")),
    Option(("--cors-origins",), "ORIGINS", "allowed origins", _cors_origins),
    Option(("-to", "--timeout"), "N", "server read/write timeout in seconds", _timeout),
    Option(("--sse-ping-interval",), "N", "server SSE ping interval in seconds", _set("sse_ping_interval", int)),
    Option(("--threads-http",), "N", "threads for HTTP requests", _set("n_threads_http", int)),
    Option(("--metrics",), "", "enable the metrics endpoint", _constant("endpoint_metrics", True)),
    Option(("--no-ui", "--no-webui"), "", "disable the Web UI", _constant("ui", False)),
    Option(("-lv", "--verbosity", "--log-verbosity"), "N", "verbosity threshold", _set("verbosity", int)),
    Option(("-fit", "--fit"), "[on|off]", "fit unset arguments into memory", _set("fit_params", _switched)),
    Option(("-dev", "--device"), "<dev1,dev2,..>", "devices for offloading, or none", _device),
    Option(("-ngl", "--gpu-layers", "--n-gpu-layers"), "N", "layers to store in VRAM", _gpu_layers),
    Option(("-ncmoe", "--n-cpu-moe"), "N", "keep the experts of the first N layers in the CPU", _cpu_moe),
    Option(("-sm", "--split-mode"), "{none,layer,row,tensor}", "how to split over devices", _set("split_mode", _SPLIT)),
    Option(("-ts", "--tensor-split"), "N0,N1,N2,...", "share of each device", _tensor_split),
    Option(("-lm", "--load-mode"), "MODE", "model loading mode", _set("load_mode", _one_of(_LOAD_MODES, _load_mode))),
    Option(("-t", "--threads"), "N", "threads for generation", _set("cpuparams.n_threads", int)),
    Option(("-tb", "--threads-batch"), "N", "threads for prompts", _set("cpuparams_batch.n_threads", int)),
    Option(("-c", "--ctx-size"), "N", "size of the prompt context", _set("n_ctx", int)),
    Option(("-np", "--parallel"), "N", "number of server slots", _set("n_parallel", int)),
    Option(("-kvu", "--kv-unified"), "", "one KV pool for all slots", _constant("kv_unified", True)),
    Option(("-no-kvu", "--no-kv-unified"), "", "a KV pool for each slot", _constant("kv_unified", False)),
    Option(("--no-context-shift",), "", "never shift the context", _constant("ctx_shift", False)),
    Option(("-ctk", "--cache-type-k"), "TYPE", "KV cache data type for K", _set("cache_type_k", _KV)),
    Option(("-ctv", "--cache-type-v"), "TYPE", "KV cache data type for V", _set("cache_type_v", _KV)),
    Option(("-fa", "--flash-attn"), "[on|off|auto]", "flash attention",
           _set("flash_attn_type", _one_of(("on", "off", "auto"), _flash_attention))),
    Option(("-b", "--batch-size"), "N", "logical maximum batch size", _set("n_batch", int)),
    Option(("-ub", "--ubatch-size"), "N", "physical maximum batch size", _set("n_ubatch", int)),
    Option(("-cram", "--cache-ram"), "N", "prompt cache in MiB", _set("cache_ram_mib", int)),
    Option(("-ctxcp", "--ctx-checkpoints"), "N", "checkpoints per slot", _set("n_ctx_checkpoints", int)),
    Option(("-cms", "--checkpoint-min-step"), "N", "spacing of checkpoints", _set("checkpoint_min_step", int)),
    Option(("-mm", "--mmproj"), "FILE", "multimodal projector", _set("mmproj.path")),
    Option(("--no-mmproj-offload",), "", "keep the projector in RAM", _constant("mmproj_use_gpu", False)),
    Option(("-mmdev", "--mmproj-device"), "DEVICE", "device of the projector", _set("mmproj_device")),
    Option(("--embedding", "--embeddings"), "", "serve embeddings", _constant("embedding", True)),
    Option(("--rerank", "--reranking"), "", "serve reranking", _rerank),
    Option(("--pooling",), "{none,mean,cls,last,rank}", "pooling of embeddings", _set("pooling_type", _POOLING)),
    Option(("--jinja",), "", "use the jinja engine for chat", _constant("use_jinja", True)),
    Option(("--no-jinja",), "", "do not use the jinja engine for chat", _constant("use_jinja", False)),
    Option(("--chat-template",), "TEMPLATE", "chat template", _set("chat_template")),
    Option(("--chat-template-file",), "FILE", "chat template from a file",
           _set("chat_template", lambda path: Path(path).read_text(encoding="utf-8"))),
    Option(("--no-warmup",), "", "no empty run after loading", _constant("warmup", False)),
    Option(("--cache-reuse",), "N", "chunk size of cache reuse", _set("n_cache_reuse", int)),
    Option(("--slot-prompt-similarity",), "X", "how alike prompts share a slot", _set("slot_prompt_similarity", float)),
    Option(("-s", "--seed"), "SEED", "RNG seed", _set("sampling.seed", lambda value: int(value) % 2**32)),
    Option(("--temp", "--temperature"), "N", "temperature", _set("sampling.temp", float)),
    Option(("--top-k",), "N", "top-k sampling", _set("sampling.top_k", int)),
    Option(("--top-p",), "N", "top-p sampling", _set("sampling.top_p", float)),
    Option(("--min-p",), "N", "min-p sampling", _set("sampling.min_p", float)),
)  # fmt: skip


# --- what it says about itself ---------------------------------------------------------------------------------------


def _print_version() -> int:
    version = str(xllamacpp.__version__)
    build = version.rpartition(".")[2]
    number = build if build.isdigit() else "0"
    print(f"version: xllamacpp {version} (build {number}, commit {xllamacpp.BUILD_INFO['commit']})", file=sys.stderr)
    print(f"built with {xllamacpp.BUILD_INFO['compiler']} for {xllamacpp.BUILD_INFO['build_target']}", file=sys.stderr)
    return 0


def _print_help() -> int:
    rows = [("-h, --help, --usage", "print usage and exit"), ("--version", "show version and build info")]
    rows.append(("--list-devices", "print list of available devices and exit"))
    rows += [(f"{', '.join(option.names)} {option.hint}".rstrip(), option.help) for option in OPTIONS]
    for names, text in rows:
        print(f"{names:<40}{text}" if len(names) < 39 else f"{names}\n{'':<40}{text}")
    return 0


def _print_devices() -> int:
    print("Available devices:")
    for device in _devices():
        total, free = device["memory_total"] >> 20, device["memory_free"] >> 20
        print(f"  {device['name']}: {device['description']} ({total} MiB, {free} MiB free)")
    if not _devices():
        print("  (none)")
    return 0


def _devices() -> list[dict[str, Any]]:
    kinds = xllamacpp.ggml_backend_dev_type
    gpus = {getattr(kinds, name) for name in dir(kinds) if name.endswith(("TYPE_GPU", "TYPE_IGPU"))}
    return [device for device in xllamacpp.get_device_info() if device["type"] in gpus]


if __name__ == "__main__":
    sys.exit(main())
