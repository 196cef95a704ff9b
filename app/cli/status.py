"""A running gateway's ``GET /admin/status`` on a terminal: memory as bars, models as a table, what happened. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Status = Mapping[str, Any]

_MIB = 1 << 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_LEAST_BAR = 20
_COLOURS = {
    "others": "grey50",
    "weights": "blue",
    "experts": "magenta",
    "kv_cache": "cyan",
    "state": "green",
    "compute": "yellow",
    "output": "yellow",
    "mmproj": "red",
    "draft": "red",
    "prompt_cache": "dark_cyan",
    "checkpoints": "dark_sea_green4",
}
# Letters for terminals and eyes without colours.
_LETTERS = {
    "others": "#",
    "weights": "W",
    "experts": "E",
    "kv_cache": "K",
    "state": "S",
    "compute": "C",
    "output": "O",
    "mmproj": "P",
    "draft": "D",
    "prompt_cache": "p",
    "checkpoints": "c",
}
_STATES = {"ready": "green", "starting": "yellow", "stopping": "yellow", "failed": "red"}


def screen(status: Status, rates: Iterable[float], *, url: str, width: int, events: int) -> RenderableType:
    """Everything worth seeing; ``rates`` are tokens per second, newest last, ``events`` how many lines of them."""
    parts: list[RenderableType] = [_head(status, rates, url=url), Text()]
    parts += [line for place in status["places"] for line in _place(place, width=width)]
    parts += [_legend(status["places"]), Text(), _models(status["models"])]
    if events > 0 and status["events"]:
        parts += [Text(), *(_event(event) for event in list(status["events"])[-events:])]
    return Group(*parts)


def height(status: Status) -> int:
    """Lines that ``screen`` takes at least, without events."""
    return 7 + 3 * len(status["places"]) + 2 * len(status["models"])


def answer_rate(status: Status) -> float:
    """Tokens per second that all models generate together."""
    return sum(model["answer_rate"] or 0.0 for model in status["models"])


def new_rates() -> deque[float]:
    """Where the last rates are kept."""
    return deque(maxlen=40)


def _head(status: Status, rates: Iterable[float], *, url: str) -> Text:
    models = status["models"]
    slots = sum(model["slots"] for model in models if model["state"] == "ready")
    busy, waiting = (sum(model[name] for model in models) for name in ("busy", "waiting"))
    waiting += sum(model["waiting_for_model"] for model in models)
    head = Text.assemble(
        ("llama-gateway", "bold"),
        f" {plain(status['version'])}  {plain(url)}  up {span(status['at'] - status['started_at'])}",
    )
    if status["is_draining"]:
        head.append("  stopping", "yellow")
    head.append(f"\n{answer_rate(status):,.1f} tokens/s ", "bold")
    head.append(sparkline(rates), "cyan")
    return head.append(f"  slots {busy} of {slots}  waiting {waiting}")


def _place(place: Mapping[str, Any], *, width: int) -> list[Text]:
    name = plain(place["name"])
    left = place["left_bytes"]
    said = f"{mib(left)} left" if left >= 0 else f"{mib(-left)} promised twice"
    lines = [Text.assemble((name, "bold"), f"  {said} of {mib(place['total_bytes'])}")]
    for label in ("planned", "measured"):
        figure = f" {mib(place[f'{label}_bytes']):>11}"
        bar_width = max(_LEAST_BAR, width - len(figure) - 12)
        lines.append(Text.assemble(f"  {label:<8} ", bar(place, label, width=bar_width), figure))
    return lines


def bar(place: Mapping[str, Any], label: str, *, width: int) -> Text:
    """A bar of ``width`` letters for all of the place; what is too small for one is not drawn."""
    pieces = [("others", place["others_bytes"]), *((one["part"], one["size_bytes"]) for one in place[label])]
    needed = place["others_bytes"] + max(place["planned_bytes"], place["measured_bytes"]) + place["reserve_bytes"]
    scale = width / max(1, place["total_bytes"], needed)
    drawn, position = Text(), 0.0
    for part, size_bytes in pieces:
        position += size_bytes * scale
        drawn.append(_LETTERS.get(part, "?") * (round(position) - len(drawn)), _COLOURS.get(part, ""))
    reserve = round(place["reserve_bytes"] * scale)
    drawn.append("." * max(0, width - reserve - len(drawn)), "grey30")
    return drawn.append("r" * max(0, width - len(drawn)), "grey50")


def _legend(places: Iterable[Mapping[str, Any]]) -> Text:
    used = {one["part"] for place in places for label in ("planned", "measured") for one in place[label]}
    legend = Text("  ", style="")
    for part, letter in _LETTERS.items():
        if part in used or part == "others":
            words = "other programs" if part == "others" else part.replace("_", " ")
            legend.append(letter, _COLOURS[part]).append(f" {words}  ", "grey50")
    return legend.append("r kept free", "grey50")


def _models(models: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="grey50", expand=True)
    for name, justify in (("model", "left"), ("state", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("slots", "wait", "tok/s", "last", "context"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", ratio=1, overflow="fold")
    for model in models:
        last = model["last_answer_rate"]
        table.add_row(
            plain(model["id"]),
            Text(model["state"], _STATES.get(model["state"], "")),
            f"{model['busy']}/{model['slots']}",
            str(model["waiting"] + model["waiting_for_model"]),
            f"{model['answer_rate'] or 0:,.1f}",
            f"{last:,.1f}" if last else "",
            f"{model['context_tokens']:,}",
            Text(" ".join(plain(text) for text in (model["why"], model["detail"]) if text)),
        )
    return table


def _event(event: Mapping[str, Any]) -> Text:
    clock = datetime.fromtimestamp(event["at"]).astimezone().strftime("%H:%M:%S")
    what = f"{event['kind'].replace('_', ' ')} {event['model'] or ''}".strip()
    return Text.assemble((f"{clock}  ", "grey50"), (plain(what), "bold"), f"  {plain(event['message'])}")


def plain(text: object) -> str:
    """Text without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def mib(size_bytes: int) -> str:
    """A size such as ``6,905 MiB``."""
    return f"{size_bytes / _MIB:,.0f} MiB"


def span(seconds: float) -> str:
    """``42 s``, ``7 min``, ``3 h 20 min``, ``5 d 3 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def sparkline(rates: Iterable[float]) -> str:
    """One block per rate; the highest is as high as the line."""
    values = list(rates)
    highest = max(values, default=0.0)
    if highest <= 0:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[round(value / highest * (len(_BLOCKS) - 1))] for value in values)
