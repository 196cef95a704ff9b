"""The engine's own word: llama-server started with a plan's flags prints its accounting before it reads weights."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from app.memory import Placement

_DEADLINE_SECONDS = 30
MIB = 1 << 20


def accounting(
    engine: Path, model: Path, placement: Placement, *, device: bool, environment: Mapping[str, str] | None = None
) -> dict[str, dict[str, int]]:
    """Bytes by row (``Vulkan0``, ``Host``, ``CPU_REPACK``) and part (``model``, ``context``, ``compute``).

    The engine is ended as soon as it has answered; it rounds each figure to a MiB. Empty when it says nothing.
    """
    environ = {key: text for key, text in os.environ.items() if not key.startswith("LLAMA_")}
    environ |= {"GGML_NO_BACKTRACE": "1", "GGML_VK_VISIBLE_DEVICES": "0", **(environment or {})}
    command = [str(engine), "-m", str(model), *_flags(placement), *([] if device else ["-dev", "none"])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, text=True)
    with process:
        killer = threading.Timer(_DEADLINE_SECONDS, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line) if line.startswith("{") else {}
                if event.get("type") == "fit_memory_breakdown":
                    return {row["name"]: _parts(row) for row in event["data"]["rows"]}
            return {}
        finally:
            killer.cancel()
            process.kill()


def _parts(row: Mapping[str, int]) -> dict[str, int]:
    return {part: row[part] * MIB for part in ("model", "context", "compute")}


def _flags(placement: Placement) -> list[str]:
    values: dict[str, object] = {
        "--gpu-layers": placement.gpu_layers,
        "--n-cpu-moe": placement.cpu_moe_layers,
        "--ctx-size": placement.context_per_request * placement.parallel,
        "--parallel": placement.parallel,
        "--batch-size": placement.batch,
        "--ubatch-size": placement.ubatch,
        "--cache-type-k": placement.kv_cache_k.value,
        "--cache-type-v": placement.kv_cache_v.value,
        "--flash-attn": "on" if placement.flash_attention else "off",
        "--threads": placement.threads,
        "--host": "127.0.0.1",
        "--port": 0,
        "--fit": "on",
        "--verbosity": 4,
    }
    if placement.tensor_split:
        values |= {
            "--split-mode": "layer",
            "--tensor-split": ",".join(f"{share:g}" for share in placement.tensor_split),
        }
    if not placement.cpu_moe_layers:
        # Even with 0 it counts as an override.
        del values["--n-cpu-moe"]
    return ["--no-kv-unified", "--log-jsonl", *(str(part) for pair in values.items() for part in pair)]
