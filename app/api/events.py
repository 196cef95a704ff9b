"""What happened lately."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from app.api.admin import as_admin
from app.errors import InvalidValue

_DEFAULT_COUNT = 100
_MOST = 500
_LARGEST = 1 << 53


async def list_events(request: Request) -> JSONResponse:
    """``GET /admin/events?limit=100&after=0``: the last events with a number over ``after``, oldest first."""
    gateway = as_admin(request)
    limit = _number(request, "limit", default=_DEFAULT_COUNT, least=1, most=_MOST)
    after = _number(request, "after", default=0, least=0, most=_LARGEST)
    events = gateway.events.latest(limit, after=after)
    return JSONResponse({"object": "list", "data": [event.document(for_operator=True) for event in events]})


def _number(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    asked = request.query_params.get(name, str(default))
    # isdecimal alone takes digits of other scripts, and int() refuses very long ones.
    if not (asked.isascii() and asked.isdecimal() and len(asked) < 20 and least <= int(asked) <= most):
        raise InvalidValue(f"{name!r} must be a number from {least} to {most}.", param=name)
    return int(asked)


routes: list[BaseRoute] = [Route("/admin/events", list_events)]
