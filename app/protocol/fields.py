"""Read the fields of a JSON body: the right type, within bounds, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.errors import InvalidValue, RequestError

# The engine looks keys up one by one, quadratic in their number, and recurses into what is nested.
MAX_KEYS = 1024
MAX_DEPTH = 64
MAX_INTEGER = (1 << 31) - 1


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; raises RequestError."""
    try:
        document = orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON ({str(error)[:200]}); send one JSON object in UTF-8.") from None
    if not isinstance(document, dict):
        raise RequestError("The body must be a JSON object.")
    return document


def check_size(document: Mapping[str, Any]) -> None:
    """Refuse what would keep the engine busy before it has read it; what is dropped does not matter."""
    level: list[Any] = list(document.items())
    # The document itself is the first.
    for _ in range(MAX_DEPTH - 1):
        deeper = [(name, value) for name, value in level if isinstance(value, dict | list)]
        if not deeper:
            return
        level = []
        for name, value in deeper:
            if isinstance(value, dict) and len(value) > MAX_KEYS:
                raise InvalidValue(f"'{name}' holds an object of more than {MAX_KEYS} keys.", param=name)
            level += [(name, inner) for inner in (value.values() if isinstance(value, dict) else value)]
    for name, value in level:
        if isinstance(value, dict | list):
            raise InvalidValue(f"'{name}' is nested more than {MAX_DEPTH} deep.", param=name)


def model_name(document: Mapping[str, Any]) -> str:
    """The field ``model``; raises InvalidValue."""
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidValue(
            "Name a model: the field 'model' must be a string; GET /v1/models lists them.", param="model"
        )
    return model


def boolean(document: Mapping[str, Any], name: str) -> bool:
    """A truth value, False when absent; raises InvalidValue."""
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidValue(f"'{name}' must be true or false.", param=name)
    return bool(value)


def include_usage(document: Mapping[str, Any]) -> bool:
    """Whether a stream is to end with a usage chunk; raises InvalidValue."""
    options = document.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidValue("'stream_options' must be an object.", param="stream_options")
    return boolean(options, "include_usage")


def integer(document: Mapping[str, Any], name: str, *, low: int, high: int) -> int | None:
    """An integer from ``low`` to ``high``, None when absent; raises InvalidValue."""
    value = document.get(name)
    if value is None:
        return None
    # A bool is an int in Python, and the engine would wrap an integer over 32 bits.
    if type(value) is not int or not low <= value <= high:
        raise InvalidValue(f"'{name}' must be an integer from {low} to {high}.", param=name)
    return value
