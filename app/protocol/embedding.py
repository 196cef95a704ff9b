"""Embeddings: texts or tokens in, vectors out, as numbers or as the bytes of them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from app.errors import InvalidValue, UnsupportedParameter
from app.protocol.fields import model_name, parse_object
from app.protocol.prompts import Prompt, prompts_of
from app.protocol.question import Part

_MAX_INPUTS = 2048
_FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One parsed request; ``encoding`` is ``float`` or ``base64`` (little-endian 32-bit floats)."""

    endpoint: ClassVar[str] = "embeddings"
    route: ClassVar[str] = "/v1/embeddings"
    field: ClassVar[str] = "input"
    beside: ClassVar[Prompt | None] = None

    model: str
    inputs: tuple[Prompt, ...]
    encoding: str

    def part(self, start: int, end: int) -> dict[str, Any]:
        """What the engine gets for these inputs."""
        return {"input": self.inputs[start:end], "encoding_format": self.encoding}

    def answer(self, parts: Sequence[Part], *, model_id: str) -> bytes:
        """OpenAI's list; raises KeyError, TypeError or ValueError for parts that are none."""
        vectors: dict[int, Any] = {
            part.start + int(item["index"]): item["embedding"] for part in parts for item in part.document["data"]
        }
        if sorted(vectors) != list(range(len(self.inputs))):
            raise ValueError("not a vector for each input")
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vectors[index], self.encoding)}
            for index in range(len(self.inputs))
        ]
        tokens = sum(part.tokens for part in parts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return orjson.dumps({"object": "list", "data": data, "model": model_id, "usage": usage})


def parse_embedding_request(body: bytes) -> EmbeddingRequest:
    """Check a body of ``/v1/embeddings``; raises RequestError, InvalidValue or UnsupportedParameter."""
    document = parse_object(body)
    encoding = document.get("encoding_format") or _FORMATS[0]
    if encoding not in _FORMATS:
        raise InvalidValue("'encoding_format' must be float or base64.", param="encoding_format")
    if document.get("dimensions") is not None:
        raise UnsupportedParameter(
            "'dimensions' is not supported: a vector that is cut is of use only with models trained for it.",
            param="dimensions",
        )
    return EmbeddingRequest(
        model=model_name(document), inputs=prompts_of(document, "input", most=_MAX_INPUTS), encoding=encoding
    )


def _encoded(vector: Any, encoding: str) -> Any:
    """The vector as asked for, whatever the server made of that wish."""
    if isinstance(vector, str):
        if encoding == "base64":
            return vector
        raw = base64.b64decode(vector, validate=True)
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
