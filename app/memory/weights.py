"""Tensors by where the loader puts them (llama.cpp src/llama-model.cpp load_tensors, src/llama-arch.cpp)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.gguf import TENSOR_TYPES, TensorInfo
from app.memory.shape import ModelShape

_BLOCK = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_DOWN = re.compile(r"\.ffn_down\.")
_INPUT = re.compile(r"(?:token_embd(?:_norm)?|position_embd|token_types|per_layer_token_embd)\.")
# They make the input of every layer and are loaded with the first.
_FIRST = re.compile(r"per_layer_(?:model_proj|proj_norm)\.")
# Types that ggml-cpu repacks on x86 (ggml/src/ggml-cpu/repack.cpp).
_REPACKED = frozenset(
    number for number, kind in TENSOR_TYPES.items() if kind.name in ("Q2_K", "Q4_0", "Q4_K", "IQ4_NL", "MXFP4")
)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Bytes of one block; the largest tensors are what is copied at once when a device computes what lies in RAM.

    ``largest_dense_bytes`` leaves out the down matrix, which is copied when most activations are gone.
    """

    dense_bytes: int = 0
    experts_bytes: int = 0
    largest_dense_bytes: int = 0
    largest_down_bytes: int = 0
    largest_expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Bytes of a model by the loader's classes.

    ``input_bytes`` always stay in RAM, ``output_bytes`` go with the output layer, ``tied_bytes`` are loaded a second
    time beside the output when that is on a device and the file has no output matrix of its own; ``repacked_bytes``
    are when there is no device, because the CPU rearranges matrices of some types in a copy.
    """

    blocks: tuple[BlockWeights, ...]
    input_bytes: int
    output_bytes: int
    tied_bytes: int
    repacked_bytes: int


def read_weights(shape: ModelShape, *, causal: bool, draft_head: bool = False) -> ModelWeights:
    """Sum the tensor table; blocks of a draft head that is not used are not loaded and weigh nothing."""
    loaded = shape.blocks if draft_head else shape.layers
    parts: list[list[TensorInfo]] = [[] for _ in range(loaded)]
    input_bytes = output_bytes = 0
    embedding: TensorInfo | None = None
    has_output = False
    for tensor in shape.facts.tensors:
        block = _BLOCK.search(tensor.name)
        if block is not None:
            number = int(block[1])
            if number < loaded:
                parts[number].append(tensor)
            elif number >= shape.blocks:
                output_bytes += tensor.size_bytes
        elif _FIRST.match(tensor.name):
            parts[0].append(tensor)
        elif _INPUT.match(tensor.name):
            input_bytes += tensor.size_bytes
            if tensor.name == "token_embd.weight":
                embedding = tensor
        else:
            output_bytes += tensor.size_bytes
            has_output = has_output or tensor.name == "output.weight"
    # An encoder has no output matrix, not even a borrowed one.
    tied = embedding if causal and not has_output else None
    return ModelWeights(
        blocks=tuple(_sum_block(part) for part in parts) + (BlockWeights(),) * (shape.blocks - loaded),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        tied_bytes=tied.size_bytes if tied else 0,
        repacked_bytes=tied.size_bytes if tied and tied.type in _REPACKED else 0,
    )


def _sum_block(tensors: list[TensorInfo]) -> BlockWeights:
    experts, down, others = [0], [0], [0]
    for tensor in tensors:
        kind = experts if _EXPERT.search(tensor.name) else down if _DOWN.search(tensor.name) else others
        kind.append(tensor.size_bytes)
    return BlockWeights(
        dense_bytes=sum(down) + sum(others),
        experts_bytes=sum(experts),
        largest_dense_bytes=max(others),
        largest_down_bytes=max(down),
        largest_expert_bytes=max(experts),
    )
