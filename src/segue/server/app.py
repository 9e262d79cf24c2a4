"""The HTTP application, and the routes that describe it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from segue.api.schema import openapi, redoc_page, swagger_page
from segue.config import EngineConfig
from segue.errors import SegueError
from segue.http_guard import install
from segue.server import control_routes, generation_routes, health, metrics
from segue.server.access import Access, Gate, GuardedRoute, Refusal, Routes, require_levels, unmatched
from segue.server.responses import InternalError, RouteError, error_response, json_response
from segue.version import __version__

TITLE = "Segue"

routes = Routes(Access.USER, "About")


def create_app(config: EngineConfig) -> Starlette:
    """Make the application. It answers 503 until the caller sets ``app.state.runtime``, the engine.

    Raises:
        ConfigError: an allowed host or an origin in the options is not valid.
        TypeError: a route declares no level of access.
    """
    kinds = (SegueError, HTTPException, ClientDisconnect, Exception)
    modules = (generation_routes, control_routes, health, metrics)
    app = Starlette(
        routes=[*(route for module in modules for route in module.routes), *routes],
        exception_handlers=dict.fromkeys(kinds, _on_error),
    )
    app.router.redirect_slashes = False  # `unmatched` redirects, once the key is checked
    app.state.runtime = app.state.step_check = None
    app.state.gate = gate = Gate(config)
    app.router.default = unmatched(gate, app.router.routes)
    require_levels(app.router.routes)
    # Each route makes the other checks, since they depend on its level of access.
    install(app, gate.guard, error_response, checks_all=False)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer an error that left a route or the router; the client is told nothing of a bug's details."""
    path = request.url.path
    match error:
        case SegueError():
            refusal: Refusal = request.scope.get("refusal", error_response)
            return refusal(error, path)
        case HTTPException():
            response = error_response(RouteError(error.status_code, request), path)
            response.headers.update(error.headers or {})
            return response
        case ClientDisconnect():
            return Response(status_code=499)  # nobody reads it
        case _:
            return error_response(InternalError(), path)


@routes.get("/version")
async def version(request: Request) -> Response:
    """Return the version of Segue."""
    return json_response({"version": __version__})


@routes.get("/openapi.json", hidden=True)
async def description(request: Request) -> Response:
    """Return the description of every route."""
    described = [
        (route.path_format, method, route.description)
        for route in request.app.router.routes
        if isinstance(route, GuardedRoute) and route.description is not None
        for method in sorted(route.methods or ())
    ]
    return json_response(openapi(TITLE, described))


@routes.get("/docs", hidden=True)
async def docs(request: Request) -> Response:
    """Return the description as a page to try requests on."""
    return HTMLResponse(swagger_page(TITLE))


@routes.get("/redoc", hidden=True)
async def redoc(request: Request) -> Response:
    """Return the description as a page to read."""
    return HTMLResponse(redoc_page(TITLE))
