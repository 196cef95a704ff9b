"""What the fake engine is told: its switches, and the part of llama-server's command line that matters to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "version: 0.7.0 (build 11669, commit fake)\nbuilt with Python for tests\n"
OPTIONS = """-h, --help, --usage;--version;-t, --threads N;-tb, --threads-batch N;-c, --ctx-size N
-n, --predict, --n-predict N;-b, --batch-size N;-ub, --ubatch-size N;--keep N;--swa-full
-fa, --flash-attn [on|off|auto];--perf, --no-perf;--prio N;-kvo, --kv-offload, -nkvo, --no-kv-offload
--repack, -nr, --no-repack;--no-host;-ctk, --cache-type-k TYPE;--numa TYPE;-ctv, --cache-type-v TYPE
-lm, --load-mode MODE;-dev, --device <dev1,dev2,..>;--list-devices;-cmoe, --cpu-moe
-ot, --override-tensor <tensor name pattern>=<buffer type>,...;-ncmoe, --n-cpu-moe N;-mg, --main-gpu INDEX
-ngl, --gpu-layers, --n-gpu-layers N;-sm, --split-mode {none,layer,row,tensor};-ts, --tensor-split N0,N1,N2,...
-fit, --fit [on|off];-fitt, --fit-target MiB0,MiB1,MiB2,...;-fitc, --fit-ctx N;--op-offload, --no-op-offload
-m, --model FNAME;--log-disable;--log-file FNAME;--log-colors [on|off|auto];-v, --verbose, --log-verbose;--offline
-lv, --verbosity, --log-verbosity N;--log-prefix, --no-log-prefix;--log-timestamps, --no-log-timestamps
-s, --seed SEED;-ctxcp, --ctx-checkpoints, --swa-checkpoints N;-cms, --checkpoint-min-step N;-cram, --cache-ram N
--pooling TYPE;-kvu, --kv-unified, -no-kvu, --no-kv-unified;--cache-idle-slots, --no-cache-idle-slots
--warmup, --no-warmup;--context-shift, --no-context-shift;-np, --parallel N
-cb, --cont-batching, -nocb, --no-cont-batching;-mm, --mmproj FILE;--mmproj-auto, --no-mmproj, --no-mmproj-auto
--mmproj-offload, --no-mmproj-offload;-mmdev, --mmproj-device DEVICE;--image-min-tokens N;--image-max-tokens N
-a, --alias STRING;--host HOST;--port PORT;--cors-origins ORIGINS;--ui, --webui, --no-ui, --no-webui
--embedding, --embeddings;--rerank, --reranking;--api-key KEY;--api-key-file FNAME;-to, --timeout N
--sse-ping-interval N;--threads-http N;--cache-prompt, --no-cache-prompt;--cache-reuse N;--metrics;--props
--slots, --no-slots;--jinja, --no-jinja;--reasoning-format FORMAT;--chat-template JINJA_TEMPLATE
-j, --json-schema SCHEMA;--chat-template-file JINJA_TEMPLATE_FILE;--prefill-assistant, --no-prefill-assistant
--sleep-idle-seconds SECONDS"""


@dataclass(frozen=True, slots=True)
class Switches:
    """What the engine does wrong, or slowly; chunk numbers count content chunks from 0."""

    load_seconds: float = 0.0  # every path answers 503 "Loading model" for so long
    models_ready_early: bool = False  # /v1/models answers 200 while loading
    health_flap_seconds: float = 0.0  # once loaded, /health alternates 200 and 503 with this period
    log_flood: int = 0  # lines written to stderr while loading and again at each completion
    long_line: int = 0  # bytes of one log line without an end for so long, written while loading
    log_lines: tuple[str, ...] = ()  # further lines written while loading, as they are
    offloaded: str = ""  # "a/b": the line load_tensors prints about layers on the device
    die: str = (
        ""  # rst|eof|sigkill|sigill|exit137|exit1 @ load | request (no byte sent) | 3s (after ready) | chunk number
    )
    no_memory_for: tuple[str, ...] = ()  # "--ubatch-size 1024": with any of these it runs out of memory at load …
    no_memory_of: str = "device"  # … of the device or the host
    error_event: int = -1  # an error event in place of this chunk, then a clean end without [DONE]
    half_line: int = -1  # half the bytes of this chunk's event, then a clean end without [DONE]
    silence_seconds: float = 0.0  # pause before chunk `silence_at`; the headers are sent before
    silence_at: int = 0
    segment_bytes: int = 0  # every stream byte in HTTP chunks and writes of this size
    ping: str = ""  # raw text before each chunk: ":\n\n", "id: 1\n\n", "retry: 5\n\n"
    usage: str = "asked"  # asked | always | never
    tool_deltas: tuple[
        Mapping[str, Any], ...
    ] = ()  # these deltas in place of the words; calls among them are the finish_reason
    content: str = ""  # the text of every chunk in place of the words
    digests: str = ""  # a file that gets "ID SHA256" of the bytes of each stream that ended as it should
    log_headers: bool = False  # each request's headers are written to the log, as JSON
    audio: bool = False  # the model hears: /props says so
    close_after_response: bool = False  # closes the connection although it promised keep-alive
    keep_alive_seconds: float = 5.0  # idle connections are closed after this, as cpp-httplib does
    ignore_sigterm: bool = False
    count_calls: bool = True  # GET /calls answers {path: count, "departed": clients that left before their end}
    nctx: int = 0  # context of each slot; 0: from -c and -np, in steps of 256
    slots: int = 0  # 0: from -np
    chunks: int = 8  # length of the answer when max_tokens does not end it before
    chunk_interval_seconds: float = 0.0
    spread_phases: bool = False  # spread the second chunks of concurrent streams evenly over one interval

    @classmethod
    def parse(cls, text: str) -> Switches:
        """Raises TypeError for an unknown switch, so that a misspelt one never passes a test."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The few options that matter here."""

    host: str
    port: int
    alias: str
    context: int
    parallel: int
    keys: frozenset[str]
    words: str = ""

    @classmethod
    def parse(cls, argv: Sequence[str]) -> CommandLine:
        def option(*names: str, default: str) -> str:
            places = [place for place, word in enumerate(argv[:-1]) if word in names]
            return argv[places[-1] + 1] if places else default

        key_file = option("--api-key-file", default="")
        keys = Path(key_file).read_text().split() if key_file else []
        model = option("-m", "--model", default="fake.gguf")
        return cls(
            host=option("--host", default="127.0.0.1"),
            port=int(option("--port", default="8080")),
            alias=option("-a", "--alias", default=model),
            context=int(option("-c", "--ctx-size", default="0")) or 8192,
            parallel=max(1, int(option("-np", "--parallel", default="4"))),
            keys=frozenset(keys),
            words=f"{' '.join(argv)} ",
        )
