"""OpenAI's Responses API, without the part of it that keeps responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from app.api.body import read_json_body
from app.api.gateway import gateway_of, key_of
from app.api.preferences import preferences
from app.errors import GatewayError, ResponseNotFound
from app.protocol.responses import ResponsesRequest, ask_response, parse_responses_request, put_in_their_words
from app.proxy import ExchangeResponse, Preferences
from app.tokens import Overflow

# The API's own words for what the header x-context-overflow says.
_TRUNCATION = {"auto": Overflow.TRIM_OLDEST, "disabled": Overflow.REJECT}


class _InTheirWords:
    """Refusals of the chat request that was made of a response's, under the names that the client used."""

    def __init__(self, response: ExchangeResponse, origins: Sequence[str]) -> None:
        self._response = response
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        except GatewayError as error:
            put_in_their_words(error, self._origins)
            raise


async def create_response(request: Request) -> _InTheirWords:
    """``POST /v1/responses``: checked here, done when the response is called."""
    gateway, key = gateway_of(request), key_of(request)
    parsed = await _parse(request)
    wishes = _preferences(request, parsed)
    return _InTheirWords(gateway.proxy.generate(ask_response(parsed), key, wishes), parsed.origins)


async def count_input_tokens(request: Request) -> _InTheirWords:
    """``POST /v1/responses/input_tokens``: exact, and answered while all slots are busy."""
    gateway, key = gateway_of(request), key_of(request)
    parsed = await _parse(request)
    counting = gateway.proxy.count(parsed.chat, key, write=_count, endpoint="responses_input_tokens")
    return _InTheirWords(counting, parsed.origins)


async def find_response(request: Request) -> None:
    """Every other path below ``/v1/responses``: raises ResponseNotFound."""
    key_of(request)
    raise ResponseNotFound(
        "Responses are not stored here: what POST /v1/responses answered is all there is. "
        "Keep what you need of it, and send earlier items again in 'input'."
    )


async def _parse(request: Request) -> ResponsesRequest:
    limit_bytes = int(gateway_of(request).settings.server.max_body)
    return parse_responses_request(await read_json_body(request, limit_bytes=limit_bytes))


def _preferences(request: Request, parsed: ResponsesRequest) -> Preferences:
    wishes = preferences(request.headers)
    if wishes.overflow is None and parsed.truncation is not None:
        return replace(wishes, overflow=_TRUNCATION[parsed.truncation])
    return wishes


def _count(tokens: int) -> bytes:
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})


def _routes(path: str) -> list[BaseRoute]:
    return [
        Route(path, create_response, methods=["POST"]),
        Route(f"{path}/input_tokens", count_input_tokens, methods=["POST"]),
        Route(f"{path}/{{response_id}}", find_response, methods=["GET", "DELETE", "POST"]),
        Route(f"{path}/{{response_id}}/input_items", find_response, methods=["GET"]),
        Route(f"{path}/{{response_id}}/cancel", find_response, methods=["POST"]),
    ]


routes: list[BaseRoute] = [*_routes("/v1/responses"), *_routes("/responses")]
