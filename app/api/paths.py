"""Paths as clients write them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlashMiddleware:
    """Pure ASGI: ``/v1/models/`` is ``/v1/models``; a redirect would lose the body of a POST in many clients."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path = scope.get("path", "")
        if len(path) > 1 and path[-1] == "/" and path[-2] != "/":
            scope["path"] = path[:-1]
        await self._app(scope, receive, send)
