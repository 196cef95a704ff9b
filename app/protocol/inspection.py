"""Small questions about tokens and templates, in llama-server's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import orjson

from app.errors import InvalidValue
from app.protocol.abilities import Abilities
from app.protocol.call import Call
from app.protocol.chat import ChatRequest, chat_request
from app.protocol.fields import boolean, model_name
from app.protocol.prompts import Prompt, prompts_of

# The engine cannot be stopped in the middle of tokenizing, which takes it up to a second per MiB.
_MAX_TEXT_BYTES = 1 << 20
_MAX_TOKENS = 1 << 18


class Inspection(Call, Protocol):
    """``route`` is the name in the metrics too; ``prompts`` may hold tokens that have to exist."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...

    def document(self, abilities: Abilities) -> Mapping[str, Any]:
        """What the engine gets; raises UnsupportedParameter."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """The tokens of a text."""

    route: ClassVar[str] = "/tokenize"
    field: ClassVar[str] = "content"
    prompts: ClassVar[Sequence[Prompt]] = ()

    model: str
    fields: Mapping[str, Any]

    def document(self, abilities: Abilities) -> Mapping[str, Any]:
        """What the engine gets."""
        return self.fields


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """The text of tokens."""

    route: ClassVar[str] = "/detokenize"
    field: ClassVar[str] = "tokens"

    model: str
    prompts: tuple[Prompt, ...]

    def document(self, abilities: Abilities) -> Mapping[str, Any]:
        """What the engine gets."""
        return {"tokens": self.prompts[0] if self.prompts else []}


@dataclass(frozen=True, slots=True)
class TemplateRequest:
    """The prompt that the model's template makes of a conversation."""

    route: ClassVar[str] = "/apply-template"
    field: ClassVar[str] = "messages"
    prompts: ClassVar[Sequence[Prompt]] = ()

    chat: ChatRequest

    @property
    def model(self) -> str:
        """The model that is asked for."""
        return self.chat.model

    def document(self, abilities: Abilities) -> Mapping[str, Any]:
        """What the engine gets: the conversation as it would be answered."""
        request, _ = self.chat.adapted(abilities)
        body: dict[str, Any] = orjson.loads(request.counting_body())
        return body


def tokenize_request(document: Mapping[str, Any]) -> TokenizeRequest:
    """Check a body of ``/tokenize``; raises InvalidValue."""
    content = document.get("content")
    if not isinstance(content, str) or len(content.encode()) > _MAX_TEXT_BYTES:
        raise InvalidValue(f"'content' must be a string of at most {_MAX_TEXT_BYTES} bytes.", param="content")
    parse_special = document.get("parse_special") is None or boolean(document, "parse_special")
    fields = {
        "content": content,
        "add_special": boolean(document, "add_special"),
        "parse_special": parse_special,
        "with_pieces": boolean(document, "with_pieces"),
    }
    return TokenizeRequest(model_name(document), fields)


def detokenize_request(document: Mapping[str, Any]) -> DetokenizeRequest:
    """Check a body of ``/detokenize``; raises InvalidValue."""
    tokens = document.get("tokens")
    if not isinstance(tokens, list) or len(tokens) > _MAX_TOKENS:
        raise InvalidValue(f"'tokens' must be an array of at most {_MAX_TOKENS} token numbers.", param="tokens")
    prompts = prompts_of({"tokens": [tokens]}, "tokens", most=1) if tokens else ()
    return DetokenizeRequest(model_name(document), prompts)


def template_request(document: Mapping[str, Any]) -> TemplateRequest:
    """Check a body of ``/apply-template``; raises InvalidValue."""
    chat = chat_request(document)
    if chat.media:
        # Counted they are by /v1/chat/completions/input_tokens.
        raise InvalidValue("'messages' must hold text only here.", param="messages")
    return TemplateRequest(chat)
