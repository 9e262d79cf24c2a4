"""Bearer keys."""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from segue.config import EngineConfig
from segue.errors import AuthenticationError
from segue.server import control_routes, weight_routes
from segue.server.errors import error_response

CONTROL_PATHS = control_routes.PATHS | weight_routes.PATHS


class KeyMiddleware:
    """Lets a request pass that carries the key its route needs.

    With an API key set, every route needs it; with an admin key set, control routes need that one instead,
    and it opens the others too.
    """

    def __init__(self, app: ASGIApp, config: EngineConfig) -> None:
        self._app = app
        self._keys = [key for key in (config.api_key, config.admin_api_key) if key] if config.api_key else []
        self._admin_keys = [config.admin_api_key] if config.admin_api_key else self._keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            keys = self._admin_keys if scope["path"] in CONTROL_PATHS else self._keys
            if keys and not _carries(Request(scope), keys):
                error = AuthenticationError(
                    "a valid key is needed: send the header 'Authorization: Bearer <key>'"
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _carries(request: Request, keys: list[str]) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Each key is compared, in a time that does not tell where it differs.
    matches = [hmac.compare_digest(given.strip().encode("latin-1"), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)
