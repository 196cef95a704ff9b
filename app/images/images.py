"""The pictures of one request, made fit for an engine: every one a data: URL within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.config import ImageConfig
from app.errors import InvalidValue
from app.images.fetch import Fetcher
from app.images.look import picture_of
from app.protocol import ChatRequest

# Above this a picture is looked at on another thread: decoding base64 would hold up the streams.
_SMALL_CHARACTERS = 1 << 18


class Images:
    """Looks at pictures, and fetches those of other machines where ``config.fetch`` allows it."""

    def __init__(self, config: ImageConfig, *, fetcher: Fetcher | None = None) -> None:
        self._config = config
        self._fetcher = fetcher or Fetcher(max_bytes=int(config.max_fetch))

    async def inlined(self, request: ChatRequest) -> ChatRequest:
        """The request with all its pictures in it; raises InvalidValue naming the part at fault."""
        count = sum(1 for message in request.messages for part in _parts(message) if part["type"] == "image_url")
        if count > self._config.max_count:
            raise InvalidValue(
                f"'messages' hold {count} pictures, more than the {self._config.max_count} allowed.", param="messages"
            )
        messages = [await self._message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
        return replace(request, messages=messages)

    async def _message(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        parts = _parts(message)
        if not any(part["type"] == "image_url" for part in parts):
            return message
        looked = [await self._part(part, f"{where}.content[{i}].image_url.url") for i, part in enumerate(parts)]
        return message | {"content": looked}

    async def _part(self, part: dict[str, Any], where: str) -> dict[str, Any]:
        if part["type"] != "image_url":
            return part
        url = str(part["image_url"]["url"])
        if not url.lower().startswith("data:"):
            url = await self._fetch(url, where)
        await self._look(url, where)
        return {"type": "image_url", "image_url": {"url": url}}

    async def _fetch(self, url: str, where: str) -> str:
        if not self._config.fetch:
            raise InvalidValue(
                f"'{where}' must be a data: URL: this gateway fetches no pictures (images.fetch).", param=where
            )
        return await self._fetcher.fetch(url, where=where)

    async def _look(self, url: str, where: str) -> None:
        if len(url) <= _SMALL_CHARACTERS:
            picture_of(url, max_pixels=self._config.max_pixels, where=where)
        else:
            await asyncio.to_thread(picture_of, url, max_pixels=self._config.max_pixels, where=where)


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []
