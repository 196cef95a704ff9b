"""What an engine prints: bytes in, lines out, bounded in length and in number."""

from __future__ import annotations

from collections import deque

_LINE_LIMIT_BYTES = 4096
_LINES_KEPT = 400


class EngineOutput:
    """Splits a byte stream into lines and keeps the last of them; a line longer than 4 KiB loses its end."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._partial = bytearray()
        self.bytes_seen = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        self.bytes_seen += len(data)
        *complete, rest = data.split(b"\n")
        lines: list[str] = []
        for piece in complete:
            self._extend(piece)
            lines.append(self._finish_line())
        self._extend(rest)
        return lines

    def close(self) -> list[str]:
        """The last line, when the stream ended in the middle of it."""
        return [self._finish_line()] if self._partial else []

    def tail(self, count: int) -> list[str]:
        """The last ``count`` complete lines, oldest first."""
        return list(self._lines)[-count:] if count > 0 else []

    def _extend(self, piece: bytes) -> None:
        self._partial += piece[: max(0, _LINE_LIMIT_BYTES - len(self._partial))]

    def _finish_line(self) -> str:
        line = self._partial.decode("utf-8", "replace").rstrip("\r")
        self._partial.clear()
        self._lines.append(line)
        return line
