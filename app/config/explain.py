"""What pydantic found, as sentences with file, line, key and cure."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from app.config.document import Document
from app.config.settings import (
    Defaults,
    EngineConfig,
    FixedOffload,
    KeyConfig,
    MemoryConfig,
    ModelEntry,
    QuotaConfig,
    ServerConfig,
    Settings,
)


def explain(error: ValidationError, document: Document) -> str:
    """One sentence per problem."""
    return "\n".join(dict.fromkeys(_sentence(problem, document) for problem in error.errors()))


def _sentence(problem: Any, document: Document) -> str:
    location = problem["loc"]
    variable = "LLAMA_GATEWAY_" + "__".join(map(str, location)).upper()
    place = f"the environment variable {variable}" if is_set(variable) else document.place(location)
    if problem["type"] == "extra_forbidden":
        return f"{place}: this key is unknown{nearest(location)}"
    if problem["type"] == "missing":
        return f"{place}: this key is missing; add it."
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:].rstrip('.')}."


_SECTIONS: Mapping[str, type[BaseModel]] = {
    "server": ServerConfig,
    "engine": EngineConfig,
    "memory": MemoryConfig,
    "defaults": Defaults,
    "quota": QuotaConfig,
}


def nearest(location: Sequence[str | int]) -> str:
    """``; did you mean 'context'?`` for a misspelt key, else the list of what may stand there."""
    section: type[BaseModel] = Settings
    if len(location) > 1:
        kinds = {"models": FixedOffload if "offload" in location else ModelEntry, "keys": KeyConfig}
        section = _SECTIONS.get(str(location[0]), kinds.get(str(location[0]), Settings))
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known)}."


def is_set(variable: str) -> bool:
    """Whether the environment has this variable, in any case."""
    return variable in {name.upper() for name in os.environ}
