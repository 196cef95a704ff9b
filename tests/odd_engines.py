"""Engines that think, call, die and fail: what real ones do rarely, each under a model's name of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from tests.fleet import fake_binary
from tests.gateway import GatewayProcess, running_gateway


def call(index: int, arguments: str, **more: str) -> dict[str, Any]:
    """A delta with a part of a tool call."""
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments, **name}, **more}]}


ODD: Mapping[str, Mapping[str, Any]] = {
    "thinker": {
        "tool_deltas": [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "42"}],
        "segment_bytes": 7,
    },
    "caller": {
        "tool_deltas": [
            {"content": "I look."},
            call(0, "", name="look", id="aB3", type="function"),
            call(0, '{"where":"\\u53'),
            call(0, '17京"}'),
            call(1, '{"where":"x"}', name="look", id="cD4", type="function"),
        ]
    },
    "dying": {"die": "sigkill@3", "chunks": 50},
    # Its error is that of a full context, which passes by.
    "failing": {"error_event": 3, "chunks": 50},
    "unending": {"half_line": 3, "chunks": 50},
    "slow": {"chunks": 10_000, "chunk_interval_seconds": 0.05},
}


@contextmanager
def serving_odd_engines(model: Path, folder: Path) -> Iterator[GatewayProcess]:
    """A gateway in front of them."""
    for name, switches in ODD.items():
        (folder / f"{name}.json").write_bytes(orjson.dumps(switches))
    config = {
        "engine": {"binary": str(fake_binary(folder))},
        "memory": {"ram_reserve": 0},
        "models": {name: {"path": str(model), "context": 1024, "parallel": 1} for name in ODD},
    }
    with running_gateway(config, folder, environment={"FAKE_SWITCHES": str(folder)}) as running:
        yield running
