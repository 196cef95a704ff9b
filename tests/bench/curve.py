"""How the gateway's cost per chunk grows with the number of streams, and the memory of a stream that is idle.

`python -m tests.bench.curve --model FILE.gguf`; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .processes import CannotRun
from .proxies import PARTICIPANTS, settle
from .relay import generate_load, make_setting

Result = dict[str, Any]
IDLE_RATE = 0.2  # tokens per second of an idle stream


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.curve", description=__doc__)
    parser.add_argument("--counts", default="1,8,64,256,512", help="streams side by side, with commas between")
    parser.add_argument("--rate", type=float, default=50.0, help="most chunks per second of each stream")
    parser.add_argument("--total-rate", type=float, default=3200.0, help="most chunks per second of all")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each measured window")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="how long the idle process is watched before")
    parser.add_argument("--participant", default="gateway", choices=sorted(set(PARTICIPANTS) - {"direct"}))
    parser.add_argument("--engine", type=Path, default=os.environ.get("GATEWAY_TEST_ENGINE"), help="for the router")
    parser.add_argument("--model", type=Path, default=os.environ.get("GATEWAY_TEST_MODEL"), help="a GGUF file")
    parser.add_argument("--litellm", type=Path, default=os.environ.get("GATEWAY_TEST_LITELLM"))
    parser.add_argument("--gateway-command", default=f"{sys.executable} -m app serve --config {{config}}")
    parser.add_argument("--json", action="store_true", help="print all figures instead of the table")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, *, streams: int, rate: float) -> Result:
    """One participant with so many streams, from its start to its end; raises CannotRun."""
    print(f"measuring {streams} streams at {rate:g}/s …", file=sys.stderr, flush=True)
    options = argparse.Namespace(**vars(arguments) | {"streams": streams, "rate": rate, "bursts": 0, "requests": 0})
    start = PARTICIPANTS[arguments.participant]
    with tempfile.TemporaryDirectory(prefix="curve-") as folder, start(make_setting(options, Path(folder))) as target:
        settle()
        return generate_load(target, options)


def cost_per_chunk(result: Mapping[str, Any]) -> float:
    """CPU seconds of a chunk, without what the process spends when nothing happens."""
    idle = float(result["idle_load"]) / float(result["events_per_second"])
    return float(result["cpu_seconds_per_event"]) - idle


def render_table(results: Mapping[int, Result], idle: Result, count: int) -> str:
    """A row for each number of streams, and the memory."""
    mib = 2**20
    lines = ["| streams | chunks/s | µs CPU / chunk | RSS, MiB |", "| ---: | ---: | ---: | ---: |"]
    for streams, result in results.items():
        figures = f"{result['events_per_second']:.0f} | {cost_per_chunk(result) * 1e6:.1f}"
        lines.append(f"| {streams} | {figures} | {result['resident_bytes'] / mib:.0f} |")
    grown = (idle["resident_bytes"] - idle["idle_resident_bytes"]) / count
    lines += ["", f"Idle: {idle['idle_resident_bytes'] / mib:.0f} MiB and {idle['idle_load']:.2%} of a core."]
    lines.append(f"A stream of {IDLE_RATE:g} tokens/s: {grown / 1024:.0f} KiB each ({count} of them).")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """0 when everything was measured."""
    arguments = parse_arguments(argv)
    counts = [int(word) for word in arguments.counts.split(",")]
    try:
        rates = {count: min(arguments.rate, arguments.total_rate / count) for count in counts}
        results = {count: measure(arguments, streams=count, rate=rate) for count, rate in rates.items()}
        idle = measure(arguments, streams=counts[-1], rate=IDLE_RATE)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 1
    print(json.dumps({**results, "idle": idle}) if arguments.json else render_table(results, idle, counts[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
