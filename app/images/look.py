"""Look at a picture without decoding it: what it is, and how large."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from io import BytesIO
from pkgutil import resolve_name

from app.errors import InvalidValue

_TYPES = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp")
_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Picture:
    """One that may be passed on; ``url`` is its data: URL."""

    url: str
    width: int
    height: int


def picture_of(url: str, *, max_pixels: int, where: str) -> Picture:
    """The picture in a data: URL; raises InvalidValue for anything else, and for one of too many pixels."""
    head = _DATA_URL.match(url)
    if head is None or head[1].lower() not in _TYPES:
        raise InvalidValue(
            f"'{where}' must be a data: URL in base64 of one of the types {', '.join(_TYPES)}.", param=where
        )
    try:
        content = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(f"'{where}' is not valid base64.", param=where) from None
    width, height = _size(content)
    if width < 1 or height < 1:
        raise InvalidValue(f"'{where}' is not a picture that can be read.", param=where)
    if width * height > max_pixels:
        raise InvalidValue(
            f"'{where}' has {width * height} pixels, more than the {max_pixels} allowed; send a smaller picture.",
            param=where,
        )
    return Picture(url, width, height)


def data_url(content: bytes, media_type: str) -> str:
    """The content as a data: URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _size(content: bytes) -> tuple[int, int]:
    try:
        # Loaded with the first picture, and the parser of XML with it.
        width, height = resolve_name("imagesize:get")(BytesIO(content))
    except Exception:
        # A header that lies: the library reads on where there is nothing.
        return -1, -1
    return int(width), int(height)
