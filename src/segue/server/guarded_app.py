"""Makes an application of guarded routes; the engine's server and the router both are one."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from segue.errors import SegueError
from segue.http_guard import install
from segue.server.access import Gate, GateOptions, Refusal, join_methods, require_levels, unmatched
from segue.server.responses import InternalError, RouteError, error_response


def guarded_app(options: GateOptions, routes: Iterable[BaseRoute], root_path: str | None = None) -> Starlette:
    """Returns an application with these routes and the checks that the options ask for.

    ``root_path`` is what a proxy puts before the routes: redirects and OpenAPI's description have it.

    Raises:
        ConfigError: an allowed host or an origin in the options is not valid.
        TypeError: a route declares no level of access.
    """
    kinds = (SegueError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=list(routes), exception_handlers=dict.fromkeys(kinds, _on_error))
    app.router.redirect_slashes = False  # `unmatched` redirects, once the key is checked
    app.state.gate = gate = Gate(options)
    app.state.root_path = root_path or ""
    app.router.default = unmatched(gate, app.router.routes, app.state.root_path)
    require_levels(app.router.routes)
    join_methods(app.router.routes)
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
