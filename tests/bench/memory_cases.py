"""Configurations whose memory the ledger and the engine are asked for: real shapes, a hole for data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from app.memory import KVType, Placement
from tests import further_shapes, recurrent_shapes, shapes
from tests.gguf_writer import Shape
from tests.placements import BASE

_ALL = 999
DEFAULT = replace(BASE, gpu_layers=_ALL, context_per_request=8192)


@dataclass(frozen=True)
class Case:
    """One configuration; without ``device`` the engine runs on the CPU alone."""

    model: str
    placement: Placement
    device: bool = True
    projector: bool = False


MODELS: dict[str, Callable[[], Shape]] = {
    "llama 8B": lambda: shapes.dense(),
    "llama 1B tied": lambda: shapes.dense(
        layers=16, embedding=2048, head_length=64, feed_forward=8192, tied=True, keys={}
    ),
    "qwen2 7B": lambda: shapes.dense(
        architecture="qwen2", layers=28, embedding=3584, heads=28, kv_heads=4, feed_forward=18944, vocabulary=152064
    ),
    "qwen3 32B": lambda: shapes.dense(
        architecture="qwen3", layers=64, embedding=5120, heads=64, feed_forward=25600, vocabulary=151936
    ),
    "qwen3moe 30B-A3B": lambda: shapes.mixture(),
    "gpt-oss 20B": lambda: shapes.gpt_oss(),
    "glm4moe 106B-A12B": lambda: shapes.glm4moe(),
    "qwen35 4B": lambda: shapes.qwen35(),
    "qwen35moe small": lambda: shapes.qwen35moe(layers=12, experts=64, vocabulary=64000),
    "qwen35moe 35B-A3B": lambda: shapes.qwen35moe(),
    "qwen35moe 35B-A3B with draft head": lambda: shapes.qwen35moe(draft_head=True),
    "gemma3 4B": lambda: shapes.gemma3(),
    "deepseek2 16B": lambda: shapes.deepseek2(),
    "gemma2 2B": lambda: further_shapes.gemma2(),
    "mamba2 1.3B": lambda: recurrent_shapes.mamba2(),
    "granite-4.0-h": lambda: recurrent_shapes.granitehybrid(),
    "falcon-h1 1.5B": lambda: recurrent_shapes.falcon_h1(),
    "lfm2 1.2B": lambda: recurrent_shapes.lfm2(),
    "phi3 3.8B": lambda: further_shapes.phi3(),
    "cohere2 7B": lambda: further_shapes.cohere2(),
    "llama4 109B-A17B": lambda: further_shapes.llama4(),
    "jamba 26B": lambda: recurrent_shapes.jamba(),
    "nemotron_h 9B": lambda: recurrent_shapes.nemotron_h(),
    "rwkv7 1.5B": lambda: recurrent_shapes.rwkv7(),
    "qwen3next 80B-A3B": lambda: further_shapes.qwen3next(),
    "gemma3n E4B": lambda: further_shapes.gemma3n(),
    "gemma4 E4B": lambda: further_shapes.gemma4(),
    "gemma4 26B-A4B": lambda: further_shapes.gemma4_mixture(),
    "lfm2moe 8B-A1B": lambda: recurrent_shapes.lfm2moe(),
    "nemotron_h_moe 30B-A3B": lambda: recurrent_shapes.nemotron_h_moe(),
    "kimi-linear 48B-A3B": lambda: recurrent_shapes.kimi_linear(),
}


def cases() -> Iterator[Case]:
    """Everything on the device, experts in RAM, whole layers in RAM, no device; contexts, slots, types, batches."""
    for model, placements in _CASES.items():
        yield from (Case(model, _placement(**changes)) for changes in placements)
    yield from (Case(model, _placement(gpu_layers=0, **changes), device=False) for model, changes in _ON_CPU)
    yield Case("gemma3 4B", replace(_placement(), mmproj_on="Vulkan0"), projector=True)


def random_cases(count: int, seed: int) -> Iterator[Case]:
    """Settings that the formulas were not fitted on, sensible or not."""
    chance = random.Random(seed)
    for _ in range(count):
        model = chance.choice(list(MODELS))
        keys = MODELS[model]().keys
        blocks, experts = int(keys["block_count"]), "expert_count" in keys
        changes: dict[str, Any] = {
            "kv": chance.choice(["f16", "q8_0", "q4_0"]),
            "context_per_request": chance.choice([2048, 4096, 8192, 16384, 32768, 65536]),
            "parallel": chance.choice([1, 1, 2, 4]),
            "ubatch": chance.choice([256, 512, 512, 1024, 2048]),
        }
        where = chance.choice(["everything", "experts", "layers", "two devices"])
        if where == "layers":
            changes |= {"gpu_layers": chance.randint(1, blocks), "cpu_moe_layers": blocks if experts else 0}
        elif where == "two devices":
            first = chance.randint(2, blocks - 2)
            changes["tensor_split"] = (float(first), float(blocks + 1 - first))
        elif where == "experts" and experts:
            changes["cpu_moe_layers"] = chance.randint(1, blocks)
        yield Case(model, _placement(**changes))


def _placement(**changes: Any) -> Placement:
    kind = KVType(changes.pop("kv", "f16"))
    return replace(DEFAULT, kv_cache_k=kind, kv_cache_v=kind, **changes)


_HEAD = {"draft_head": True, "draft_tokens": 3}
_CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama 8B": (
        {"context_per_request": 4096},
        {"context_per_request": 32768, "kv": "q8_0"},
        {"context_per_request": 131072, "kv": "q4_0"},
        {"parallel": 4},
        {"ubatch": 2048},
        {"gpu_layers": 20},
        {"gpu_layers": 20, "context_per_request": 32768, "kv": "q8_0", "parallel": 2},
        {"gpu_layers": 1},
        {"tensor_split": (16.0, 17.0)},
        {"tensor_split": (10.0, 10.0, 13.0), "context_per_request": 32768, "kv": "q8_0", "ubatch": 2048},
        {"tensor_split": (10.0, 10.0), "gpu_layers": 20},
    ),
    "llama 1B tied": ({}, {"gpu_layers": 9, "ubatch": 2048}),
    "qwen2 7B": ({"context_per_request": 32768}, {"gpu_layers": 15}),
    "qwen3 32B": (
        {"context_per_request": 4096, "gpu_layers": 22},
        {"context_per_request": 16384, "gpu_layers": 22},
        {"context_per_request": 32768, "gpu_layers": 22, "kv": "q8_0"},
        {"context_per_request": 32768, "kv": "q8_0"},
    ),
    "qwen3moe 30B-A3B": (
        {"context_per_request": 32768},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 37},
        {"cpu_moe_layers": 48, "ubatch": 2048},
        {"cpu_moe_layers": 24, "parallel": 4},
        {"gpu_layers": 25, "cpu_moe_layers": 48},
        {"context_per_request": 131072, "kv": "q4_0", "cpu_moe_layers": 48},
    ),
    "gpt-oss 20B": (
        {"context_per_request": 32768},
        {"context_per_request": 32768, "cpu_moe_layers": 13, "kv": "q8_0"},
        {"context_per_request": 131072, "cpu_moe_layers": 24, "parallel": 2},
        {"cpu_moe_layers": 12, "ubatch": 2048},
        {"gpu_layers": 12, "cpu_moe_layers": 24},
    ),
    "glm4moe 106B-A12B": (
        {},
        {"cpu_moe_layers": 47, "context_per_request": 32768, "kv": "q8_0"},
        {"cpu_moe_layers": 30},
        {"cpu_moe_layers": 46, "ubatch": 2048},
    ),
    "qwen35 4B": (
        {"context_per_request": 32768},
        {"context_per_request": 131072, "kv": "q8_0", "parallel": 2},
        {"gpu_layers": 16},
    ),
    "qwen35moe small": ({}, {"cpu_moe_layers": 1}, {"cpu_moe_layers": 6, "parallel": 4}, {"cpu_moe_layers": 12}),
    "qwen35moe 35B-A3B": (
        {"context_per_request": 32768, "kv": "q8_0"},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 30},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 30, "ubatch": 1024},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 40, "ubatch": 2048},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 32, "parallel": 4},
        {"context_per_request": 131072, "kv": "q8_0", "cpu_moe_layers": 34},
        {"context_per_request": 32768, "cpu_moe_layers": 33, "ubatch": 1024},
        {"gpu_layers": 20, "cpu_moe_layers": 40},
        {"tensor_split": (20.0, 21.0), "context_per_request": 32768},
        {"tensor_split": (29.0, 12.0), "context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 20},
    ),
    "qwen35moe 35B-A3B with draft head": (
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 30},
        {"gpu_layers": 41, "cpu_moe_layers": 41},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 30, **_HEAD},
        {"parallel": 4, **_HEAD},
        {"cpu_moe_layers": 41, "ubatch": 2048, **_HEAD},
    ),
    "gemma3 4B": (
        {"context_per_request": 32768},
        {"context_per_request": 131072, "kv": "q8_0", "parallel": 2},
        {"gpu_layers": 17, "context_per_request": 16384},
        {"ubatch": 2048},
        {"tensor_split": (17.0, 18.0)},
    ),
    "deepseek2 16B": (
        {},
        {"context_per_request": 32768, "kv": "q8_0"},
        {"cpu_moe_layers": 20, "context_per_request": 32768},
        {"cpu_moe_layers": 27, "ubatch": 2048},
    ),
    "gemma2 2B": ({}, {"gpu_layers": 8, "parallel": 2}),
    "mamba2 1.3B": ({"context_per_request": 32768}, {"gpu_layers": 20, "parallel": 4}),
    "granite-4.0-h": ({"context_per_request": 32768}, {"gpu_layers": 20, "parallel": 2}),
    "falcon-h1 1.5B": ({}, {"gpu_layers": 12, "kv": "q8_0"}),
    "lfm2 1.2B": ({"context_per_request": 32768}, {"gpu_layers": 8, "parallel": 2}),
    "phi3 3.8B": ({}, {"context_per_request": 32768, "kv": "q8_0"}, {"gpu_layers": 16, "parallel": 2}),
    "cohere2 7B": ({"context_per_request": 32768}, {"gpu_layers": 16, "kv": "q8_0"}),
    "llama4 109B-A17B": (
        {"context_per_request": 32768},
        {"context_per_request": 32768, "cpu_moe_layers": 48, "kv": "q8_0"},
        {"cpu_moe_layers": 40, "parallel": 2},
    ),
    "jamba 26B": (
        {"context_per_request": 32768},
        {"cpu_moe_layers": 16},
        {"gpu_layers": 8, "parallel": 2},
        {"tensor_split": (9.0, 8.0)},
    ),
    "nemotron_h 9B": ({"context_per_request": 32768}, {"gpu_layers": 28, "parallel": 2}),
    "qwen3next 80B-A3B": (
        {"context_per_request": 32768},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 40},
        {"cpu_moe_layers": 48, "ubatch": 2048},
    ),
    "gemma3n E4B": ({}, {"context_per_request": 32768, "kv": "q8_0", "parallel": 2}, {"gpu_layers": 18}),
    "rwkv7 1.5B": ({"context_per_request": 32768}, {"gpu_layers": 12, "parallel": 4}),
    "gemma4 E4B": ({}, {"context_per_request": 32768, "kv": "q8_0", "parallel": 2}, {"gpu_layers": 20}),
    "gemma4 26B-A4B": (
        {"context_per_request": 32768},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 20, "parallel": 2},
        {"cpu_moe_layers": 30, "ubatch": 2048},
    ),
    "lfm2moe 8B-A1B": ({"context_per_request": 32768}, {"cpu_moe_layers": 12, "parallel": 4}, {"cpu_moe_layers": 24}),
    "nemotron_h_moe 30B-A3B": (
        {"context_per_request": 32768},
        {"context_per_request": 32768, "kv": "q8_0", "cpu_moe_layers": 40, "parallel": 2},
        {"cpu_moe_layers": 52, "ubatch": 2048},
    ),
    "kimi-linear 48B-A3B": (
        {"context_per_request": 32768},
        {"context_per_request": 32768, "cpu_moe_layers": 20, "parallel": 2},
        {"cpu_moe_layers": 27, "ubatch": 2048},
    ),
}
_ON_CPU: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama 8B", {}),
    ("llama 8B", {"kv": "q8_0", "parallel": 4, "batch": 128, "ubatch": 128}),
    ("llama 1B tied", {}),
    ("qwen3moe 30B-A3B", {"context_per_request": 32768, "kv": "q8_0"}),
    ("gpt-oss 20B", {}),
    ("qwen35moe 35B-A3B", {"batch": 128, "ubatch": 128}),
    ("gemma3 4B", {"context_per_request": 32768}),
    ("deepseek2 16B", {}),
    ("mamba2 1.3B", {}),
    ("granite-4.0-h", {}),
)
