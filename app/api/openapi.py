"""The description of the API, for programs."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import orjson
import yaml
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_FILE = Path(__file__).with_name("openapi.yaml")


@cache
def description() -> bytes:
    """The OpenAPI document as JSON."""
    return orjson.dumps(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


async def show_description(request: Request) -> Response:
    """``GET /openapi.json``."""
    return Response(await asyncio.to_thread(description), media_type="application/json")


routes: list[BaseRoute] = [Route("/openapi.json", show_description)]
