"""Header → key. Only hashes are configured; every comparison takes the same time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.config import KeyConfig
from app.errors import InvalidApiKey, ModelNotAllowed
from app.quota import Limits

_EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who asks, which models (public names) they may use, and whether they may manage the gateway.

    ``comments`` says whether silent streams get keep-alive comments; some clients cannot read them.
    """

    name: str
    models: frozenset[str]
    admin: bool = False
    comments: bool = True
    limits: Limits = field(default_factory=Limits)
    weight: float = 1.0
    is_batch: bool = False
    max_tokens_ceiling: int | None = None

    def allows(self, model_id: str) -> bool:
        """Whether the key may use this model."""
        return _EVERY_MODEL in self.models or model_id in self.models

    @property
    def visible_models(self) -> frozenset[str] | None:
        """The models that it may use; None for all."""
        return None if _EVERY_MODEL in self.models else self.models

    def require(self, model_id: str) -> None:
        """Raise ModelNotAllowed unless the key may use this model."""
        if not self.allows(model_id):
            raise ModelNotAllowed(
                f"The key {self.name!r} may not use the model {model_id!r}; ask the operator to allow it.",
                param="model",
            )


# The one caller of a gateway without keys.
ANONYMOUS = ApiKey(name="anonymous", models=frozenset({_EVERY_MODEL}))


class Authenticator:
    """Finds the key of a request; with no keys configured everybody is ANONYMOUS."""

    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._keys = tuple((bytes.fromhex(key.hash.removeprefix("sha256:")), _api_key(key)) for key in keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return (key for _, key in self._keys) if self._keys else iter((ANONYMOUS,))

    def authenticate(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiKey:
        """The key of the ``Authorization: Bearer`` or ``x-api-key`` header; raises InvalidApiKey."""
        if not self._keys:
            return ANONYMOUS
        tokens = {token for name, value in headers if (token := _token(name, value)) is not None}
        if len(tokens) > 1:
            raise InvalidApiKey("The request carries two different API keys; send one.")
        found = self._find(tokens.pop()) if tokens else None
        if found is None:
            raise InvalidApiKey("No valid API key was given; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        return found

    def _find(self, token: bytes) -> ApiKey | None:
        digest = hashlib.sha256(token).digest()
        found = None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                found = key
        return found


def _api_key(key: KeyConfig) -> ApiKey:
    return ApiKey(
        key.name,
        frozenset(key.models),
        key.admin,
        key.comments,
        limits=Limits(
            key.requests_per_minute,
            key.tokens_per_minute,
            key.requests_per_day,
            key.tokens_per_day,
            key.gpu_seconds_per_day,
            key.concurrent,
        ),
        weight=key.weight,
        is_batch=key.priority == "batch",
        max_tokens_ceiling=key.max_tokens_ceiling,
    )


def _token(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value.strip()
    if name == b"authorization":
        scheme, _, token = value.strip().partition(b" ")
        # An unknown scheme is a wrong key, not an absent one.
        return token.strip() if scheme.lower() == b"bearer" else scheme + b" " + token
    return None
