"""Plain attention: every layer keeps K and V of the whole context."""

from __future__ import annotations

from dataclasses import replace

from app.memory.families.family import Family, LayerCache, attention_cache
from app.memory.shape import ModelShape

_ARCHITECTURES = """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell command-r dbrx deci
    deepseek dots1 ernie4_5 ernie4_5-moe exaone exaone-moe falcon glm4 glm4moe gpt2 gptj gptneox granite granitemoe grok
    grovemoe hunyuan-dense hunyuan-moe hunyuan_v1_dense internlm2 jais llada llada-moe llama maincoder minicpm
    minimax-m2 mistral3 mpt nemotron olmo olmoe openelm orion pangu-embedded phi2 phimoe plamo qwen qwen2 qwen2moe
    qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact rnd1 seed_oss smollm3 solar stablelm starcoder starcoder2 xverse
"""


def layer_caches(shape: ModelShape) -> tuple[LayerCache, ...]:
    """K and V by the heads of each layer."""
    return tuple(attention_cache(shape, layer) for layer in range(shape.layers))


FAMILY = Family("attention", frozenset(_ARCHITECTURES.split()), layer_caches)
# Q, K and V are views of one matrix's result, which costs a copy more.
FUSED = replace(FAMILY, architectures=frozenset({"phi3"}), host_copies=1.5)
UNKNOWN = replace(FAMILY, name="generic", architectures=frozenset(), known=False)
