"""What relaying costs: the same load through each participant in turn, one table.

`python -m tests.bench.relay --engine LLAMA_SERVER --model FILE.gguf`; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .processes import CannotRun
from .proxies import MODEL, PARTICIPANTS, Setting, Target, settle

Result = dict[str, Any]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    environ = os.environ.get
    parser = argparse.ArgumentParser(prog="python -m tests.bench.relay", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="streams side by side")
    parser.add_argument("--rate", type=float, default=50.0, help="chunks per second of each stream")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of the measured window")
    parser.add_argument("--requests", type=int, default=2000, help="small requests without streaming, 8 at a time")
    parser.add_argument("--bursts", type=int, default=10, help="times that all streams start at once")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each participant; the table shows medians")
    parser.add_argument("--only", help="participants, with commas between; all, but LiteLLM only with --litellm")
    parser.add_argument("--engine", type=Path, default=environ("GATEWAY_TEST_ENGINE"), help="native llama-server")
    parser.add_argument("--model", type=Path, default=environ("GATEWAY_TEST_MODEL"), help="a GGUF file")
    parser.add_argument("--litellm", type=Path, default=environ("GATEWAY_TEST_LITELLM"), help="the program litellm")
    command = f"{sys.executable} -m app serve --config {{config}}"
    parser.add_argument("--gateway-command", default=command, help="with {config} where the file's path goes")
    parser.add_argument("--json", action="store_true", help="print all figures instead of the table")
    arguments = parser.parse_args(argv)
    if arguments.only is None:
        arguments.only = ",".join(name for name in PARTICIPANTS if name != "litellm" or arguments.litellm)
    unknown = set(arguments.only.split(",")) - set(PARTICIPANTS)
    if unknown:
        parser.error(f"--only knows {', '.join(PARTICIPANTS)}, not {', '.join(sorted(unknown))}")
    return arguments


def make_setting(arguments: argparse.Namespace, folder: Path) -> Setting:
    """The context holds the longest answer and the prompt, in the engine's steps of 256."""
    answer = (arguments.seconds + 2) * arguments.rate
    return Setting(
        folder=folder,
        streams=arguments.streams,
        rate=arguments.rate,
        context=(int(answer) // 256 + 2) * 256,
        engine=arguments.engine and arguments.engine.resolve(),
        model=arguments.model and arguments.model.resolve(),
        gateway_command=arguments.gateway_command,
        # Not resolved: the program of an environment may be a link.
        litellm=arguments.litellm and arguments.litellm.absolute(),
    )


def measure(name: str, arguments: argparse.Namespace) -> Result:
    """One participant, from its start to its end; raises CannotRun."""
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        setting = make_setting(arguments, Path(folder))
        with PARTICIPANTS[name](setting) as target:
            settle()
            return generate_load(target, arguments)


def generate_load(target: Target, arguments: argparse.Namespace) -> Result:
    names = ("streams", "rate", "seconds", "bursts", "requests")
    load = {name: getattr(arguments, name) for name in names} | {
        "port": target.port,
        "model": MODEL,
        "headers": dict(target.headers),
        "proxy_pids": target.proxy_pids,
        "engine_pids": target.engine_pids,
        "rewrites": target.rewrites,
        "idle_seconds": getattr(arguments, "idle_seconds", 0.0),
    }
    argv = [sys.executable, "-m", "tests.bench.load", json.dumps(load)]
    limit = 60 + arguments.seconds * 2 + arguments.bursts * 5 + arguments.requests / 20
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"The load was not over after {limit:.0f} s.") from None
    if done.returncode != 0:
        raise CannotRun(f"The load failed: {done.stderr.strip()[-1500:]}")
    result: Result = json.loads(done.stdout)
    return result


def percentile(values: Sequence[float], share: float) -> float:
    """By the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summarise(results: Mapping[str, Sequence[Result]]) -> dict[str, Result]:
    """Medians over the runs; times to the first token pooled over the runs, with the direct ones taken off."""
    first = {name: [v for run in runs for v in run["first_token_seconds"]] for name, runs in results.items()}
    summary: dict[str, Result] = {}
    for name, runs in results.items():
        numbers = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
        row: Result = {key: percentile([run[key] for run in runs], 0.5) for key in numbers}
        latencies = [value for run in runs for value in run["request_seconds"]]
        row["request_seconds_p50"] = percentile(latencies, 0.5)
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            row[f"first_token_seconds_{label}"] = percentile(first[name], share)
            if "direct" in first:
                row[f"added_seconds_{label}"] = percentile(first[name], share) - percentile(first["direct"], share)
        summary[name] = row
    return summary


HEADINGS = (
    "",
    "µs CPU / chunk",
    "x nginx",
    "ms CPU / request",
    "added first token p50 / p99, ms",
    "request p50, ms",
    "RSS idle / loaded, MiB",
    "chunks/s",
    "engine / generator, cores",
)


def render_row(name: str, row: Result, nginx: Result | None) -> list[str]:
    """Direct has no process between: its first token is shown as it is, not as what is added."""
    is_direct = name == "direct"
    per_chunk, mib = row["cpu_seconds_per_event"] * 1e6, 2**20
    ratio = f"{per_chunk / (nginx['cpu_seconds_per_event'] * 1e6):.2f}" if nginx and not is_direct else "-"
    key = "first_token_seconds" if is_direct or "added_seconds_p50" not in row else "added_seconds"
    first = f"{row[f'{key}_p50'] * 1e3:.1f} / {row[f'{key}_p99'] * 1e3:.1f}"
    return [
        name,
        "-" if is_direct else f"{per_chunk:.1f}",
        ratio,
        "-" if is_direct else f"{row['cpu_seconds_per_request'] * 1e3:.2f}",
        f"({first})" if key == "first_token_seconds" else first,
        f"{row['request_seconds_p50'] * 1e3:.1f}",
        "-" if is_direct else f"{row['idle_resident_bytes'] / mib:.0f} / {row['resident_bytes'] / mib:.0f}",
        f"{row['events_per_second']:.0f}",
        f"{row['engine_load']:.2f} / {row['generator_load']:.2f}",
    ]


def render_table(summary: Mapping[str, Result], arguments: argparse.Namespace) -> str:
    rows = [HEADINGS, ["---"] + ["---:"] * (len(HEADINGS) - 1)]
    rows += [render_row(name, row, summary.get("nginx")) for name, row in summary.items()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    load = f"{arguments.streams} streams x {arguments.rate:g} chunks/s for {arguments.seconds:g} s"
    size = next(iter(summary.values()))["event_bytes"]
    others = f"{arguments.requests} requests; {arguments.bursts} bursts; {arguments.repeat} run(s)"
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    note = f"{load}, {size} bytes a chunk; {others}; {machine}."
    return f"{table}\n\n{note} In brackets: the time itself, nothing taken off."


def render_ratios(summary: Mapping[str, Result]) -> str:
    """CPU of the gateway over that of each other participant that lies between."""
    own = summary.get("gateway")
    others = {name: row for name, row in summary.items() if name not in ("gateway", "direct")}
    if own is None or not others:
        return ""
    lines = []
    for what in ("event", "request"):
        key = f"cpu_seconds_per_{what}"
        ratios = (f"{name} {own[key] / row[key]:.2f}" for name, row in others.items())
        lines.append(f"CPU of the gateway per {'chunk' if what == 'event' else what} / that of: {', '.join(ratios)}")
    return "\n".join(["", "", *lines])


def main(argv: Sequence[str]) -> int:
    """0 when every participant asked for was measured."""
    arguments = parse_arguments(argv)
    results: dict[str, list[Result]] = {}
    missing = False
    for _ in range(arguments.repeat):
        for name in arguments.only.split(","):
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            try:
                results.setdefault(name, []).append(measure(name, arguments))
            except CannotRun as reason:
                missing = True
                print(f"{name}: {reason}", file=sys.stderr, flush=True)
    summary = summarise({name: runs for name, runs in results.items() if runs})
    if summary:
        print(
            json.dumps(summary, indent=1)
            if arguments.json
            else render_table(summary, arguments) + render_ratios(summary)
        )
    return int(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
