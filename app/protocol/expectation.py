"""What an answer must be to count as one: a document of the promised format, or a call of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

import orjson

from app.errors import InvalidValue

_MAX_SCHEMA_BYTES = 100_000
_FORMATS = ("text", "json_object", "json_schema")
_WHERE = "response_format"


class Validator(Protocol):
    """A compiled schema."""

    def iter_errors(self, instance: Any) -> Any:
        """What is wrong with a document."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """``schema`` is what a strict ``json_schema`` promises; ``needs_json`` that the content is one JSON object.

    The engine's grammar does not keep these promises for every schema: it drops a pattern that it cannot express, lets
    free text come before a required call, and knows nothing of an answer that its limit has cut.
    """

    needs_json: bool = False
    schema: Validator | None = None
    needs_call: bool = False

    def __bool__(self) -> bool:
        return self.needs_json or self.needs_call

    def problem(self, choice: Mapping[str, Any]) -> str | None:
        """What is wrong with a finished choice; an answer that was cut says so by its ``finish_reason``."""
        message = choice.get("message") or {}
        if choice.get("finish_reason") == "length":
            return None
        if message.get("tool_calls"):
            return None
        if self.needs_call:
            return "the model answered without calling a tool, although 'tool_choice' requires a call"
        return self._problem_of_json(message.get("content")) if self.needs_json else None

    def _problem_of_json(self, content: Any) -> str | None:
        try:
            document = orjson.loads(content or "")
        except (orjson.JSONDecodeError, TypeError):
            return "the model's answer is not JSON, although 'response_format' asks for it"
        if self.schema is None:
            return None if isinstance(document, dict) else "the model's answer is JSON, but not an object"
        for error in self.schema.iter_errors(document):
            place = "".join(f"[{step!r}]" for step in error.instance_path)[:200] or "its top"
            return f"the model's answer does not follow the schema of 'response_format': see {place}"
        return None


NOTHING = Expectation()


def expectation(fields: Mapping[str, Any]) -> Expectation:
    """What the fields of a checked chat request promise; raises InvalidValue for a format that nobody can keep."""
    form = fields.get("response_format") or {}
    kind = form.get("type", "text")
    if kind not in _FORMATS:
        raise InvalidValue(f"'{_WHERE}.type' must be one of {', '.join(_FORMATS)}.", param=f"{_WHERE}.type")
    needs_call = fields.get("tool_choice") == "required"
    if kind != "json_schema":
        return Expectation(needs_json=kind == "json_object", needs_call=needs_call)
    outer = form.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(outer, dict) or not isinstance(schema, dict):
        raise InvalidValue(
            f"'{_WHERE}.json_schema' must be an object that holds a 'schema'.", param=f"{_WHERE}.json_schema"
        )
    compiled = _compiled(schema)
    is_strict = outer.get("strict") is True
    return Expectation(needs_json=is_strict, schema=compiled if is_strict else None, needs_call=needs_call)


def _compiled(schema: Mapping[str, Any]) -> Validator:
    where = f"{_WHERE}.json_schema.schema"
    if len(orjson.dumps(schema)) > _MAX_SCHEMA_BYTES:
        raise InvalidValue(f"'{where}' is over {_MAX_SCHEMA_BYTES} bytes.", param=where)
    try:
        # Loaded with the first schema: it is 4 MB that most gateways never need.
        compiler = resolve_name("jsonschema_rs:validator_for")
        validator: Validator = compiler(dict(schema), retriever=_refuse_to_fetch)
    except ValueError as error:
        reason = str(error).partition("\n")[0][:200]
        raise InvalidValue(f"'{where}' is not a valid JSON schema: {reason}.", param=where) from None
    return validator


def _refuse_to_fetch(uri: str) -> Any:
    """A schema is what the client sends, never what stands at an address."""
    raise ValueError("references to other documents are not followed")
