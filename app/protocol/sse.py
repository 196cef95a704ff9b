"""Cut a byte stream into server-sent events, wherever the network cut it."""

from __future__ import annotations

# The longest event we hold while waiting for its end; a tool call or a logprobs chunk is a few KiB.
MAX_EVENT_BYTES = 4 << 20


class EventTooLong(ValueError):
    """An event did not end within MAX_EVENT_BYTES."""


class SSESplitter:
    """Incremental splitter: bytes in, whole events out, each with its closing blank line.

    Lines may end in LF or CRLF. What has not ended yet waits in ``pending``.
    """

    __slots__ = ("_max_bytes", "pending")

    def __init__(self, *, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self.pending = b""
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that ``chunk`` completes; raises EventTooLong."""
        # What waits has been looked through; an ending may only straddle its last three bytes.
        seen = max(0, len(self.pending) - 3)
        data = self.pending + chunk
        events = []
        start = 0
        while (end := _event_end(data, max(start, seen))) > 0:
            events.append(data[start:end])
            start = end
        self.pending = data[start:]
        if len(self.pending) > self._max_bytes:
            raise EventTooLong(f"an event is longer than {self._max_bytes} bytes")
        return events


def _event_end(data: bytes, start: int) -> int:
    """Index after the next blank line, or 0."""
    lf = data.find(b"\n\n", start)
    crlf = data.find(b"\r\n\r\n", start)
    if crlf >= 0 and (lf < 0 or crlf < lf):
        return crlf + 4
    return lf + 2 if lf >= 0 else 0


def event_data(event: bytes) -> bytes:
    """The joined ``data:`` lines of an event; empty for a comment."""
    lines = event.splitlines()
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
