"""What a server elsewhere says of its models: which one is meant, and how much a request may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from app.errors import EngineUnusable, UpstreamFailed


class RouteMissing(Exception):
    """The server has no such route."""


class Questions(Protocol):
    """A server that can be asked."""

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, *, at_root: bool = False) -> Any:
        """The JSON answer; raises RouteMissing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The model's name there, and what each request may use, in tokens."""

    model: str
    context_tokens: int


async def choose_limits(
    server: Questions, *, public_name: str, stated_name: str | None, stated_context: int | None
) -> Limits:
    """The limits by what is configured and what the server says, whichever is less; raises EngineUnusable."""
    try:
        listed = _models(await server.ask("models"))
    except RouteMissing:
        listed = []
    entry = _choose(listed, public_name=public_name, stated_name=stated_name)
    told = None
    # A server of many models would load one to answer for it.
    if len(listed) <= 1:
        with suppress(RouteMissing):
            told = _positive(await server.ask("props", at_root=True), "default_generation_settings", "n_ctx")
    told = told or _context_of(entry)
    context = min((limit for limit in (told, stated_context) if limit is not None), default=None)
    if context is None:
        raise EngineUnusable(
            f"The server of {public_name!r} does not say how much a request may use; add 'context' to the model."
        )
    return Limits(stated_name or str(entry.get("id") or public_name), context)


def _choose(listed: Sequence[Mapping[str, Any]], *, public_name: str, stated_name: str | None) -> Mapping[str, Any]:
    """The entry that is meant; an empty one when the server lists nothing."""
    for wanted in (stated_name, public_name):
        for entry in listed:
            if wanted is not None and (entry.get("id") == wanted or wanted in (entry.get("aliases") or ())):
                return entry
    if stated_name is not None or not listed:
        return {}
    if len(listed) == 1:
        return listed[0]
    raise EngineUnusable(
        f"The server of {public_name!r} has {len(listed)} models and none of that name; say which with 'remote_model'."
    )


def _models(document: Any) -> list[Mapping[str, Any]]:
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        raise UpstreamFailed("The remote server's list of models cannot be read.")
    return [entry for entry in data if isinstance(entry, dict)]


def _context_of(entry: Mapping[str, Any]) -> int | None:
    """vLLM and this gateway say ``max_model_len``, others one of the further names."""
    return _positive(entry, "max_model_len") or _positive(entry, "meta", "n_ctx") or _positive(entry, "context_length")


def _positive(document: Any, *path: str) -> int | None:
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, int) and not isinstance(document, bool) and document > 0 else None
