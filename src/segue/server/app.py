"""The HTTP application, and the routes that describe it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from segue.api.schema import redoc_page, reply_schema, swagger_page
from segue.api.shapes import VersionReply
from segue.config import EngineConfig
from segue.server import (
    control_routes,
    fleet_routes,
    generation_routes,
    health,
    info_routes,
    leg_routes,
    messages_routes,
    metrics,
    tokenization_routes,
    vllm_routes,
    webpage,
    webpage_feed,
)
from segue.server.access import Access, Routes, describe
from segue.server.guarded_app import guarded_app
from segue.server.responses import json_response
from segue.server.webpage_engine import EngineFeedSource
from segue.server.webpage_feed import Feed
from segue.version import __version__

TITLE = "Segue"

routes = Routes(Access.USER, "About")


def create_app(config: EngineConfig) -> Starlette:
    """Make the application. It answers 503 until the caller sets ``app.state.runtime``, the engine.

    Raises:
        ConfigError: an allowed host or an origin in the options is not valid.
        TypeError: a route declares no level of access.
    """
    modules = (
        generation_routes,
        messages_routes,
        tokenization_routes,
        leg_routes,
        control_routes,
        vllm_routes,
        info_routes,
        fleet_routes,
        health,
        metrics,
    )
    found: list[BaseRoute] = [*(route for module in modules for route in module.routes), *routes]
    if not config.disable_webpage:
        found += [*webpage.routes, *webpage_feed.routes]
    app = guarded_app(config, found, config.root_path)
    app.state.runtime = app.state.step_check = None
    app.state.feed = Feed(EngineFeedSource(app.state))
    return app


@routes.get("/version", schema=reply_schema(VersionReply))
async def version(request: Request) -> Response:
    """Return the version of Segue."""
    return json_response({"version": __version__})


@routes.get("/openapi.json", hidden=True)
async def description(request: Request) -> Response:
    """Return the description of every route."""
    app = request.app
    return json_response(describe(TITLE, app.router.routes, app.state.root_path))


@routes.get("/docs", hidden=True)
async def docs(request: Request) -> Response:
    """Return the description as a page to try requests on."""
    return HTMLResponse(swagger_page(TITLE))


@routes.get("/redoc", hidden=True)
async def redoc(request: Request) -> Response:
    """Return the description as a page to read."""
    return HTMLResponse(redoc_page(TITLE))
