"""The pages of deploy/clients: their examples, made to ask the gateway of a test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "deploy" / "clients"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Heading and text of every section."""
    _, *parts = _HEADING.split((FOLDER / page).read_text(encoding="utf-8"))
    return zip(parts[::2], parts[1::2], strict=True)


def example(page: str, heading: str, *, language: str) -> str:
    """The one example of that language under a heading, as it stands there."""
    (text,) = (text for title, text in sections(page) if title == heading)
    (code,) = (code for kind, code in _FENCE.findall(text) if kind == language)
    return str(code)


def examples(page: str, *, language: str) -> list[str]:
    """Every example of that language."""
    found = _FENCE.findall((FOLDER / page).read_text(encoding="utf-8"))
    return [code for kind, code in found if kind == language]


def adapted(code: str, *, url: str, model: str) -> str:
    """The example with the address and the model of a test, and short answers."""
    code = code.replace("http://127.0.0.1:8080", url).replace('"model"', f'"{model}"', 1_000)
    # The name of a field in JSON is no name of a model.
    code = code.replace(f'"{model}":', '"model":').replace("model_name: model", f"model_name: {model}")
    return re.sub(r"(tokens\W{1,4})50\b", r"\g<1>8", code)
