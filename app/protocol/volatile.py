"""Clock times at the head of a system prompt, which change with each request and make the cached prompt useless."""

from __future__ import annotations

import re
from dataclasses import replace

from app.protocol.abilities import Headers
from app.protocol.chat import ChatRequest

_LINES = 5
# Only a time of day right behind a date: `2026-11-30T18:22:48.123Z`, `2026-11-30 18:22`, `Mon Nov 30 18:22:48 2026`.
_MOMENT = re.compile(
    r"(\b\d{4}-\d{2}-\d{2}[T ]|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) "
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d )"
    r"([01]\d|2[0-3])(:[0-5]\d(?::[0-5]\d(?:\.\d{1,9})?)?)(?![\d:])"
)


def with_rounded_times(request: ChatRequest) -> tuple[ChatRequest, Headers]:
    """The request with the moments at the head of its system prompt set back to the full hour, and the note of it.

    Date, hour, zone, length and everything else stay; what is no such moment is not touched.
    """
    first = request.messages[0]
    content = first.get("content")
    if first["role"] != "system" or not isinstance(content, str):
        return request, []
    lines = content.splitlines(keepends=True)
    head = [_MOMENT.sub(_to_the_hour, line) for line in lines[:_LINES]]
    changed = [number for number, (old, new) in enumerate(zip(lines, head, strict=False), 1) if old != new]
    if not changed:
        return request, []
    message = first | {"content": "".join(head + lines[_LINES:])}
    note = f"times in the system prompt, line {', '.join(map(str, changed))}".encode("ascii")
    return replace(request, messages=[message, *request.messages[1:]]), [(b"x-prompt-rounded", note)]


def _to_the_hour(moment: re.Match[str]) -> str:
    return moment[1] + moment[2] + re.sub(r"\d", "0", moment[3])
