"""A request to go on with a text: the legacy API, prompts as they are, without a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from app.errors import InvalidValue
from app.protocol.abilities import Abilities, Headers
from app.protocol.expectation import NOTHING, Expectation
from app.protocol.fields import (
    MAX_INTEGER,
    boolean,
    check_size,
    include_usage,
    integer,
    model_name,
    parse_object,
)
from app.protocol.prompts import Prompt, prompts_of
from app.protocol.steering import check_numbers, check_shapes
from app.protocol.streamed import streamed_body

_FORWARDED = frozenset(
    {
        "dry_allowed_length",
        "dry_base",
        "dry_multiplier",
        "dry_penalty_last_n",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "mirostat",
        "mirostat_eta",
        "mirostat_tau",
        "n",
        "presence_penalty",
        "repeat_last_n",
        "repeat_penalty",
        "seed",
        "stop",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
    }
)
_MAX_PROMPTS = 128
# By so much of a prompt it is known again: what two prompts have in common is found in steps of a block.
_BLOCK_CHARACTERS = 512
_BLOCK_TOKENS = 128
# What the engine ignores without a word, and the value that asks for nothing.
_NOT_THERE: Mapping[str, tuple[Any, str]] = {
    "echo": (False, "the prompt is not sent back"),
    "best_of": (1, "one answer is made per choice"),
    "suffix": ("", "use /infill with a model that was trained for it"),
    "logprobs": (None, "use /v1/chat/completions with 'logprobs': true"),
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One parsed request; ``choices`` counts the answers to all prompts, ``max_tokens`` holds for each."""

    route: ClassVar[str] = "/v1/completions"
    expectation: ClassVar[Expectation] = NOTHING

    model: str
    prompts: tuple[Prompt, ...]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    choices: int
    fields: Mapping[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The blocks of a single prompt, by which the slot is found that has read its beginning before."""
        prompt = self.prompts[0]
        size = _BLOCK_CHARACTERS if isinstance(prompt, str) else _BLOCK_TOKENS
        return [{"block": prompt[start : start + size]} for start in range(0, len(prompt), size)]

    def slots_at_once(self, capacity: int) -> int:
        """Slots that it keeps busy; prompts wait for each other inside the engine, choices of one prompt do not."""
        return min(self.choices, capacity) if len(self.prompts) > 1 else self.choices

    def adapted(self, abilities: Abilities) -> tuple[CompletionRequest, Headers]:
        """The same: a raw prompt needs nothing of a template."""
        return self, []

    def engine_body(self, *, max_tokens: int, slot: int | None = None) -> bytes:
        """What the engine gets."""
        prompt = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        return streamed_body(self.fields, max_tokens=max_tokens, slot=slot, prompt=prompt)


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Check a body of ``/v1/completions``; raises RequestError or InvalidValue naming the field."""
    return completion_request(parse_object(body))


def completion_request(document: Mapping[str, Any]) -> CompletionRequest:
    """The same for a body that is read already; raises InvalidValue."""
    _refuse_what_is_not_there(document)
    fields = {key: document[key] for key in _FORWARDED if document.get(key) is not None}
    check_size(fields)
    check_numbers(fields)
    check_shapes(fields)
    stream = boolean(document, "stream")
    prompts = prompts_of(document, "prompt", most=_MAX_PROMPTS)
    return CompletionRequest(
        model=model_name(document),
        prompts=prompts,
        stream=stream,
        include_usage=stream and include_usage(document),
        max_tokens=integer(document, "max_tokens", low=1, high=MAX_INTEGER),
        choices=_choices(fields, prompts),
        fields=fields,
    )


def _refuse_what_is_not_there(document: Mapping[str, Any]) -> None:
    for name, (nothing, instead) in _NOT_THERE.items():
        value = document.get(name)
        if value is not None and (value != nothing or type(value) is not type(nothing)):
            raise InvalidValue(f"'{name}' is not supported: {instead}.", param=name)


def _choices(fields: Mapping[str, Any], prompts: Sequence[Prompt]) -> int:
    choices = int(fields.get("n", 1))
    if choices > 1 and len(prompts) > 1:
        raise InvalidValue("'n' over 1 takes a single prompt; send one request per prompt.", param="n")
    return choices * len(prompts)
