"""The HTTP application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from segue.config import EngineConfig
from segue.errors import SegueError
from segue.http_guard import install
from segue.server import (
    about_routes,
    control_routes,
    health,
    metrics,
    native_routes,
    openai_routes,
    weight_routes,
)
from segue.server.access import Gate, require_levels, unmatched
from segue.server.responses import InternalError, RouteError, error_response
from segue.server.service import Service


def create_app(config: EngineConfig) -> Starlette:
    """The application. It answers 503 until ``app.state.service.runtime`` is set.

    Raises:
        ConfigError: a host or an origin in the options is none.
        TypeError: a route declares no level of access.
    """
    kinds = (SegueError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(exception_handlers=dict.fromkeys(kinds, _on_error))
    app.router.redirect_slashes = False  # `unmatched` redirects, once the key is checked
    app.state.service = Service(config)
    app.state.gate = gate = Gate(config)
    for rooms in (openai_routes, native_routes, control_routes, weight_routes, health, metrics, about_routes):
        app.router.routes.extend(rooms.routes)
    app.router.default = unmatched(gate, app.router.routes)
    require_levels(app.router.routes)
    install(app, gate.guard, error_response, checks_all=False)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    match error:
        case SegueError():
            return error_response(error, path)
        case HTTPException():
            response = error_response(RouteError(error.status_code, request), path)
            response.headers.update(error.headers or {})
            return response
        case ClientDisconnect():
            return Response(status_code=499)  # nobody reads it
        case _:
            return error_response(InternalError(), path)
