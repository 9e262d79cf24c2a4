"""The HTTP application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from segue.config import EngineConfig
from segue.errors import SegueError
from segue.http_guard import check_path, install
from segue.server import (
    about_routes,
    control_routes,
    health,
    metrics,
    native_routes,
    openai_routes,
    weight_routes,
)
from segue.server.access import Gate, Unmatched, require_levels
from segue.server.errors import InternalError, RouteError, error_response
from segue.server.service import Service
from segue.server.sse import ClientGoneError


def create_app(config: EngineConfig) -> Starlette:
    """The application. It answers 503 until ``app.state.service.runtime`` is set.

    Raises:
        ConfigError: a host or an origin in the options is none.
        TypeError: a route declares no level of access.
    """
    app = Starlette(
        exception_handlers={
            SegueError: _on_segue_error,
            HTTPException: _on_http_error,
            ClientGoneError: _on_client_gone,
            ClientDisconnect: _on_client_gone,  # while it sent its body
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # `Unmatched` redirects, once the key is checked
    app.state.service = Service(config)
    app.state.gate = gate = Gate(config)
    for rooms in (openai_routes, native_routes, control_routes, weight_routes, health, metrics, about_routes):
        app.router.routes.extend(rooms.routes)
    app.router.default = Unmatched(gate, app.router.routes)
    require_levels(app.router.routes)
    install(app, gate.guard, check_path, _refusal)
    return app


def _refusal(error: SegueError, scope: Scope) -> ASGIApp:
    return error_response(error, scope["path"])


async def _on_segue_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SegueError)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(RouteError(error.status_code, request), request.url.path)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(InternalError("internal error; the server's log has the details"), request.url.path)
