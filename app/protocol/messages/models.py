"""The list of models as Anthropic's API has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def model_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """One model, from OpenAI's document of it."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def model_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of them on one page."""
    data = [model_info(model) for model in models]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
