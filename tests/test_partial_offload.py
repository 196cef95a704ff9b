"""A real load of a small mixture, experts of some layers in RAM: planned against measured, answers as on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import shapes
from tests.gateway import GatewayProcess, running_gateway
from tests.random_model import write_random

MIB = 1 << 20
IN_RAM = 3


@pytest.fixture(scope="module")
def gateway(native_engine: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One model twice: with a software device and experts of three layers in RAM, and on the CPU alone."""
    if native_engine is None:
        pytest.skip("no native engine")
    folder = tmp_path_factory.mktemp("partial")
    shape = shapes.small_mixture()
    path = str(write_random(folder / "mixture.gguf", shape))
    common: dict[str, Any] = {"path": path, "context": 512, "max_tokens": 32}
    config = {
        "engine": {"binary": str(native_engine)},
        "memory": {"ram_reserve": "256MiB"},
        "models": {
            "split": {**common, "offload": {"cpu_moe_layers": IN_RAM}},
            "host": {**common, "offload": {"gpu_layers": 0}},
        },
    }
    # Software devices are left out unless they are named.
    with running_gateway(config, folder, environment={"GGML_VK_VISIBLE_DEVICES": "0"}) as running:
        yield running


def answer(gateway: GatewayProcess, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say it again. " * 4}],
        "temperature": 0,
        "max_tokens": 24,
        "seed": 1,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def memory(text: str, kind: str, model: str) -> dict[tuple[str, str], float]:
    """Bytes by device and part of one model in the metrics."""
    line = re.compile(rf"^llama_gateway_model_memory_{kind}_bytes{{(.*)}} (\S+)$", re.MULTILINE)
    found = {}
    for labels, number in line.findall(text):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if values["model"] == model:
            found[values["device"], values["part"]] = float(number)
    return found


@pytest.mark.slow
def test_answers_are_those_of_the_cpu_and_memory_is_as_planned(gateway: GatewayProcess) -> None:
    split = answer(gateway, "split")
    metrics = httpx.get(f"{gateway.url}/metrics").text
    planned, measured = memory(metrics, "planned", "split"), memory(metrics, "measured", "split")
    devices = {device for device, _ in planned if device != "host"}
    if not devices:
        pytest.skip("the native engine sees no device, not even a software one")
    device = devices.pop()
    weights = planned[device, "weights"] + planned[device, "experts"]
    assert measured[device, "model"] == pytest.approx(weights, abs=MIB)
    assert measured[device, "kv"] == pytest.approx(planned[device, "kv_cache"], abs=MIB // 8)
    total = sum(size for (name, _), size in measured.items() if name == device)
    assert sum(size for (name, _), size in planned.items() if name == device) == pytest.approx(total, rel=0.06)
    assert planned["host", "experts"] == IN_RAM * planned[device, "experts"] / (6 - IN_RAM)
    assert 'llama_gateway_offloaded_layers{kind="actual",model="split"} 7.0' in metrics
    assert 'llama_gateway_offloaded_layers{kind="planned",model="split"} 7.0' in metrics

    assert split == answer(gateway, "host")
    assert len(split) > 24
