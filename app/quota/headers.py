"""How a key stands, in the headers that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Iterable

from app.quota.ledger import Standing
from app.quota.refusals import span


def rate_headers(standing: Iterable[Standing]) -> list[tuple[bytes, bytes]]:
    """``x-ratelimit-{limit,remaining,reset}-{requests,tokens}`` of the tightest limit of each; none without limits."""
    headers: list[tuple[bytes, bytes]] = []
    for unit in ("requests", "tokens"):
        limited = [one for one in standing if one.window.unit == unit and one.limit is not None]
        if not limited:
            continue
        tightest = min(limited, key=lambda one: one.remaining or 0)
        headers += [
            (b"x-ratelimit-limit-" + unit.encode(), b"%d" % (tightest.limit or 0)),
            (b"x-ratelimit-remaining-" + unit.encode(), b"%d" % (tightest.remaining or 0)),
            (b"x-ratelimit-reset-" + unit.encode(), span(tightest.resets_in_seconds).encode()),
        ]
    return headers
