"""What the server is: its version, and the description of its routes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from segue.api.schema import openapi, redoc_page, swagger_page
from segue.server.access import Access, GuardedRoute, Routes
from segue.server.responses import json_response
from segue.version import __version__

TITLE = "Segue"

routes = Routes(Access.USER, "About")


def _path_parameters(route: GuardedRoute) -> dict[str, Any]:
    names = sorted(route.param_convertors)
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    return {"parameters": parameters} if parameters else {}


@routes.get("/version")
async def version(request: Request) -> Response:
    """Return the version of Segue."""
    return json_response({"version": __version__})


@routes.get("/openapi.json", hidden=True)
async def description(request: Request) -> Response:
    """Return the description of every route."""
    described = [
        (route.path_format, method, {**_path_parameters(route), **route.description})
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
