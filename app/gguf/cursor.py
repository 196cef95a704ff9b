"""Bounded reading of little-endian values off the head of a file."""

from __future__ import annotations

import re
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from app.gguf.facts import Scalar
from app.gguf.problems import damaged, truncated

_MAX_HEADER_BYTES = 64 << 20
_MAX_STRING_BYTES = 16 << 20
_MAX_STRINGS = 4 << 20
_CHUNK_BYTES = 1 << 20

U32, U64 = Struct("<I"), Struct("<Q")

# A run of short strings, each behind its length: three times as fast as to step over one after the other. The
# alternatives differ in their first byte and nothing is ever tried twice.
_RUN = 64
_SHORT_STRINGS = re.compile(
    b"(?s:%b){%d}+" % (b"|".join(re.escape(U64.pack(length)) + b".{%d}" % length for length in range(32)), _RUN)
)


class Cursor:
    """Takes little-endian values off the head of a file and reads no further than they go."""

    __slots__ = ("_buffer", "_file", "_position", "_strings_left", "path", "size")

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._buffer = bytearray()
        self._position = 0
        self._strings_left = _MAX_STRINGS

    @property
    def position(self) -> int:
        return self._position

    def peek(self, count: int) -> bytes:
        self._fill(min(count, self.size))
        return bytes(self._buffer[:count])

    def number(self, kind: Struct) -> int:
        self._fill(self._position + kind.size)
        (value,) = kind.unpack_from(self._buffer, self._position)
        self._position += kind.size
        return value  # type: ignore[no-any-return]

    def count(self, what: str, limit: int) -> int:
        value = self.number(U64)
        if value > limit:
            raise damaged(self.path, f"it claims {value} {what}")
        return value

    def text(self, what: str, limit: int = _MAX_STRING_BYTES) -> str:
        length = self.count(f"bytes for {what}", limit)
        end = self._position + length
        self._fill(end)
        raw = self._buffer[self._position : end]
        self._position = end
        return raw.decode("utf-8", "replace")

    def numbers(self, kind: Struct, count: int) -> tuple[Scalar, ...]:
        many = Struct(f"<{count}{kind.format[1:]}")
        self._fill(self._position + many.size)
        values = many.unpack_from(self._buffer, self._position)
        self._position += many.size
        return values

    def texts(self, what: str, count: int) -> tuple[str, ...]:
        self._take_strings(count)
        return tuple(self.text(what) for _ in range(count))

    def skip(self, count: int) -> None:
        self._fill(self._position + count)
        self._position += count

    def skip_texts(self, count: int) -> None:
        """The hot loop: a vocabulary has some 500,000 strings, of which only the lengths matter."""
        self._take_strings(count)
        left = count
        while left:
            run = _SHORT_STRINGS.match(self._buffer, self._position) if left >= _RUN else None
            if run is not None:
                self._position = run.end()
                left -= _RUN
            else:
                # Longer strings, or the end of what was read.
                self._skip_each(min(left, _RUN))
                left -= min(left, _RUN)

    def _skip_each(self, count: int) -> None:
        position, left, unpack = self._position, count, U64.unpack_from
        while left:
            self._fill(position + 8)
            buffer, last = self._buffer, len(self._buffer) - 8
            while left and position <= last:
                position += 8 + unpack(buffer, position)[0]
                left -= 1
        self._fill(position)
        self._position = position

    def _take_strings(self, count: int) -> None:
        self._strings_left -= count
        if self._strings_left < 0:
            raise damaged(self.path, f"its arrays claim more than {_MAX_STRINGS} strings")

    def _fill(self, end: int) -> None:
        have = len(self._buffer)
        if end <= have:
            return
        if end > self.size:
            raise truncated(self.path, f"its header goes on after its end at {self.size} bytes")
        if end > _MAX_HEADER_BYTES:
            raise damaged(self.path, f"its header is longer than {_MAX_HEADER_BYTES >> 20} MiB")
        wanted = max(end - have, min(max(_CHUNK_BYTES, have), _MAX_HEADER_BYTES, self.size - have))
        while wanted > 0:
            chunk = self._file.read(wanted)
            if not chunk:
                raise truncated(self.path, "it became shorter while it was read")
            self._buffer += chunk
            wanted -= len(chunk)
