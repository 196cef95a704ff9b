"""The status page as HTML: its frame once, and its regions again whenever what they show has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from app import __version__
from app.proxy import Phase, Progress
from app.views.bars import pieces, rows
from app.views.history import KEPT_SECONDS, Point, sums
from app.views.observer import ModelView, Sample
from app.views.plot import Plot, plot
from app.views.scene import Audience
from app.views.snippets import snippets

if TYPE_CHECKING:
    from jinja2 import Environment

_MIB = 1 << 20
_GIB = 1 << 30
_MOST_SLOTS_DRAWN = 8
_FOLDER = Path(__file__).parent

# Followed by the name of the model.
MODEL_REGION = "model:"

STATE_WORDS = {
    "stopped": "Stopped",
    "starting": "Starting",
    "ready": "Ready",
    "stopping": "Stopping",
    "failed": "Failed",
}
EVENT_WORDS = {
    "load": "Loaded",
    "unload": "Unloaded",
    "eviction": "Evicted",
    "restart": "Restart",
    "failed": "Failed",
    "step_down": "Stepped down",
    "degraded": "Degraded",
    "slow_down": "Slow",
    "reload": "Configuration",
}


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the page; it looks the same as long as ``shows`` is equal."""

    name: str
    shows: object
    render: Callable[[], str]


class Page:
    """Renders; the templates are read once."""

    def __init__(self) -> None:
        self.assets = {file.name: file.read_bytes() for file in sorted((_FOLDER / "assets").iterdir())}
        self._hashes = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in self.assets.items()}

    @cached_property
    def _environment(self) -> Environment:
        # Loaded when somebody looks: nobody may.
        environment: Environment = resolve_name("jinja2:Environment")(
            loader=resolve_name("jinja2:FileSystemLoader")(_FOLDER / "templates"),
            autoescape=True,
            undefined=resolve_name("jinja2:StrictUndefined"),
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {
            "size": size,
            "size_or_none": lambda size_bytes: "" if size_bytes is None else size(size_bytes),
            "figure": figure,
            "count": lambda number: f"{number:,}",
            "iso": lambda at: datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
            "clock": lambda at: datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S"),
        }
        environment.globals |= {
            "pieces": pieces,
            "rows": rows,
            "slots_of": _slots,
            "state_words": STATE_WORDS,
            "event_words": EVENT_WORDS,
        }
        return environment

    def frame(self, *, base_url: str, has_keys: bool, model: str, speaks_anthropic: bool) -> str:
        """The page without anything in it that needs a key."""
        return self._render(
            "page.html",
            base_url=base_url,
            has_keys=has_keys,
            version=__version__,
            assets=self._hashes,
            snippets=snippets(base_url, model=model, has_keys=has_keys, speaks_anthropic=speaks_anthropic),
        )

    def regions(self, sample: Sample, audience: Audience) -> Iterator[Region]:
        """Every region of the page for this audience, in order; nothing is rendered yet."""
        seen = audience.view(sample)
        yield Region("instruments", seen.models, partial(self._instruments, seen))
        if seen.places:
            yield Region("memory", seen.places, partial(self._memory, seen))
        for model in seen.models:
            yield Region(MODEL_REGION + model.id, model, partial(self._model, model, audience))
        yield Region("events", seen.events, partial(self._events, seen, audience))

    def _instruments(self, seen: Sample) -> str:
        points = sums([model.points for model in seen.models])
        latest = points[-1] if points else None
        return self._render(
            "instruments.html",
            rates={"answer": latest.answer_rate if latest else 0.0, "prompt": latest.prompt_rate if latest else 0.0},
            plots={
                "answer": _plot(points, lambda point: point.answer_rate, least=10),
                "prompt": _plot(points, lambda point: point.prompt_rate, least=10),
                "busy": _plot(points, lambda point: point.busy, least=1),
                "waiting": _plot(points, lambda point: point.waiting, least=1),
            },
            busy=sum(model.busy for model in seen.models),
            slots=sum(model.slots for model in seen.models if model.state == "ready"),
            waiting=sum(model.waiting + model.waiting_for_model for model in seen.models),
        )

    def _events(self, seen: Sample, audience: Audience) -> str:
        return self._render("events.html", events=seen.events[::-1], is_operator=audience.is_operator)

    def _memory(self, seen: Sample) -> str:
        several = sum(1 for model in seen.models if model.placement is not None) > 1
        return self._render("memory.html", places=seen.places, several=several)

    def _model(self, model: ModelView, audience: Audience) -> str:
        drawn = _plot(model.points, lambda point: point.answer_rate, least=10)
        return self._render("model.html", model=model, drawn=drawn, is_operator=audience.is_operator)

    def _render(self, template: str, **values: Any) -> str:
        return self._environment.get_template(template).render(values)


def size(size_bytes: int) -> str:
    """``1,305 MiB``, or from 100 GiB on ``125.3 GiB``."""
    if size_bytes >= 100 * _GIB:
        return f"{size_bytes / _GIB:,.1f} GiB"
    if 0 < size_bytes < _MIB:
        return "< 1 MiB"
    return f"{size_bytes / _MIB:,.0f} MiB"


def figure(value: float) -> str:
    """A measured number with as many digits as mean something."""
    return f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _plot(points: Any, value: Callable[[Point], float], *, least: float) -> Plot:
    return plot([None if point is None else value(point) for point in points], slots=KEPT_SECONDS, least_scale=least)


def _slots(model: ModelView) -> list[Mapping[str, Any]]:
    """The slots of a model: what each request has read or written; of many slots the idle ones in one piece."""
    if model.state != "ready":
        return []
    taken = [_slot(model, one) for one in model.running for _ in range(one.slots)][: model.slots]
    idle = model.slots - len(taken)
    if model.slots > _MOST_SLOTS_DRAWN and idle > 0:
        return [*taken, _idle(f"{idle} idle")]
    return [*taken, *[_idle("idle")] * idle]


def _idle(text: str) -> Mapping[str, Any]:
    return {"phase": "idle", "percent": 0, "text": text}


def _slot(model: ModelView, one: Progress) -> Mapping[str, Any]:
    whose = f" for {one.key}" if one.key and one.key != "anonymous" else ""
    if one.phase is Phase.PROMPT:
        limit = max(1, one.prompt_limit_tokens)
        percent = min(100, round(100 * one.prompt_tokens / limit))
        return {"phase": "prompt", "percent": percent, "text": f"reading {one.prompt_limit_tokens:,} tokens{whose}"}
    used = (one.prompt_tokens or one.prompt_limit_tokens) + one.answer_tokens
    percent = min(100, round(100 * used / max(1, model.context_tokens)))
    return {"phase": "answer", "percent": percent, "text": f"{one.answer_tokens:,} tokens written{whose}"}
