"""How much the model shall think → what its template and the engine take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidValue
from app.protocol.fields import MAX_INTEGER, integer

# None leaves it to the template, as does a request that says nothing.
_ENABLES: Mapping[str, bool | None] = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": None}
# Templates know three.
_EFFORTS: Mapping[str, str] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the client wishes; templates that cannot think pass over it."""

    enable: bool | None = None
    budget_tokens: int | None = None
    effort: str | None = None
    is_shown: bool = True

    def chat_fields(self) -> dict[str, Any]:
        """Fields of a chat request, for the template."""
        kwargs = {} if self.enable is None else {"chat_template_kwargs": {"enable_thinking": self.enable}}
        return kwargs | ({} if self.effort is None else {"reasoning_effort": self.effort})

    def engine_fields(self) -> dict[str, Any]:
        """Fields that only the engine knows: it ends the thinking when the budget is used up."""
        return {} if self.budget_tokens is None else {"thinking_budget_tokens": self.budget_tokens}


def read_thinking(document: Mapping[str, Any]) -> Thinking:
    """``thinking`` and ``output_config.effort``; raises InvalidValue."""
    wish = document.get("thinking")
    effort = _effort(document)
    if wish is None:
        return Thinking(effort=effort)
    if not isinstance(wish, dict) or wish.get("type") not in tuple(_ENABLES):
        raise InvalidValue(f"'thinking' must be an object of type {', '.join(_ENABLES)}.", param="thinking")
    budget = None
    if wish["type"] == "enabled":
        budget = integer(wish, "budget_tokens", low=1, high=MAX_INTEGER)
        if budget is None:
            raise InvalidValue("'thinking.budget_tokens' is missing.", param="thinking.budget_tokens")
    return Thinking(_ENABLES[wish["type"]], budget, effort, wish.get("display") != "omitted")


def _effort(document: Mapping[str, Any]) -> str | None:
    config = document.get("output_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise InvalidValue("'output_config' must be an object.", param="output_config")
    effort = config.get("effort")
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise InvalidValue(
            f"'output_config.effort' must be one of {', '.join(_EFFORTS)}.", param="output_config.effort"
        )
    return _EFFORTS[effort]
