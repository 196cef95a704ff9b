"""Fetch a picture from an address that the whole world reaches, within bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from app.errors import InvalidValue
from app.images.address import is_public
from app.images.look import data_url

_MAX_REDIRECTS = 3
_SECONDS = 10.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class _Forbidden(OSError):
    """A name that leads into this network."""


class _CheckedResolver(AbstractResolver):
    """Resolves a name once and hands on only addresses that may be asked: the connection is made to those."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._inner = aiohttp.ThreadedResolver()
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        # One forbidden address is enough: a name of the internet has none.
        if not found or not all(self._is_allowed(one["host"]) for one in found):
            raise _Forbidden(f"{host} is no address on the internet")
        return found

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True, slots=True)
class Fetcher:
    """``max_bytes`` for one picture; ``is_allowed`` says which addresses may be asked."""

    max_bytes: int
    is_allowed: Callable[[str], bool] = is_public
    seconds: float = _SECONDS

    async def fetch(self, address: str, *, where: str) -> str:
        """The picture as a data: URL; raises InvalidValue that does not say what stands at a forbidden address."""
        try:
            async with asyncio.timeout(self.seconds):
                return await self._follow(address, where)
        except TimeoutError:
            raise _refused(where, f"it did not come within {self.seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise _refused(where, "its address cannot be asked or does not answer") from None

    async def _follow(self, address: str, where: str) -> str:
        connector = aiohttp.TCPConnector(resolver=_CheckedResolver(self.is_allowed), use_dns_cache=False)
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        ) as session:
            url = URL(address)
            for _ in range(_MAX_REDIRECTS + 1):
                self._require_allowed(url)
                async with session.get(url, allow_redirects=False, headers={"accept": "image/*"}) as response:
                    if response.status in _REDIRECTS:
                        url = url.join(URL(response.headers.get("location", "")))
                        continue
                    return await self._read(response, where)
        raise _refused(where, f"it was passed on more than {_MAX_REDIRECTS} times")

    def _require_allowed(self, url: URL) -> None:
        """A host that is an address already never reaches the resolver."""
        if url.scheme not in ("http", "https") or not url.host or url.user is not None:
            raise _Forbidden("only http and https, and no name with a password")
        if url.host_subcomponent is not None and _is_literal(url.host) and not self.is_allowed(url.host):
            raise _Forbidden(f"{url.host} is no address on the internet")

    async def _read(self, response: aiohttp.ClientResponse, where: str) -> str:
        if response.status != 200 or not response.content_type.startswith("image/"):
            raise _refused(where, "what stands there is no picture")
        content = bytearray()
        async for part in response.content.iter_any():
            content += part
            if len(content) > self.max_bytes:
                raise _refused(where, f"it is over {self.max_bytes} bytes")
        return data_url(bytes(content), response.content_type)


def _is_literal(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def _refused(where: str, reason: str) -> InvalidValue:
    return InvalidValue(f"The picture of '{where}' was not fetched: {reason}.", param=where)
