"""The router's HTTP application: routes for clients, whose requests go to a worker, and for operators."""

from __future__ import annotations

from itertools import chain
from urllib.parse import quote

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from segue.router import (
    control_routes,
    engine_metrics,
    health_routes,
    info_routes,
    weight_routes,
    worker_routes,
)
from segue.router.config import RouterConfig
from segue.router.router import Router, router_of
from segue.router.status import RouterCollector, laps_status
from segue.router.watch import ROUTER_HEADER
from segue.router.webpage import RouterFeedSource
from segue.server import webpage, webpage_feed
from segue.server.access import Access, Routes, describe
from segue.server.guarded_app import guarded_app
from segue.server.raw_body import read_bytes
from segue.server.responses import RouteError, error_response, json_response
from segue.server.webpage_feed import Feed
from segue.version import __version__


def create_router_app(config: RouterConfig) -> Starlette:
    """Make the application; ``app.state.router`` is its :class:`Router`, which has no workers yet.

    Raises:
        ConfigError: an allowed host or an origin in the options is not valid.
    """
    groups = (
        generation,
        worker_routes.routes,
        laps,
        identity,
        control_routes.routes,
        info_routes.routes,
        weight_routes.routes,
        health_routes.routes,
        metrics,
        engine_metrics.routes,
        about,
        *(() if config.disable_webpage else (webpage.routes, webpage_feed.routes)),
    )
    app = guarded_app(config, chain.from_iterable(groups), config.root_path)
    app.state.token_check = None  # of /health_generate
    app.state.feed = Feed(RouterFeedSource(router := Router.create(config)))
    app.state.scrape = None  # of /engine_metrics
    app.state.router = router
    return app


# --- clients ---

generation = Routes(Access.USER, "Generation")


@generation.post("/generate")
@generation.post("/v1/chat/completions")
@generation.post("/v1/chat/completions/tokens")
@generation.post("/v1/completions")
@generation.post("/v1/responses")
@generation.post("/v1/messages")
@generation.post("/inference/v1/generate")
async def generate(request: Request) -> ASGIApp:
    """Generate: the worker that is predicted to be done first answers."""
    router = router_of(request)
    body = await read_bytes(request, router.config.max_body_mib)
    return router.relay(request.scope, body)


@generation.post("/tokenize")
@generation.post("/detokenize")
@generation.post("/v1/chat/completions/render")
@generation.post("/v1/completions/render")
@generation.post("/v1/messages/count_tokens")
async def tokenize(request: Request) -> ASGIApp:
    """What a worker makes of a text or of token ids, without generating."""
    router = router_of(request)
    body = await read_bytes(request, router.config.max_body_mib)
    return router.pass_through(request.scope["path"], body)


@generation.get("/v1/models")
@generation.get("/v1/models/{name:path}")
async def models(request: Request) -> ASGIApp:
    """The models, or the one of that name, as a worker lists them.

    A name with ".." would be another path for a proxy in front of the worker, reached with the worker's key.
    """
    if not {".", ".."}.isdisjoint(request.path_params.get("name", "").split("/")):
        raise RouteError(404, request)
    return router_of(request).pass_through(quote(request.scope["path"]))


# --- operators ---

laps = Routes(Access.ADMIN, "Workers")


@laps.get("/laps_status")
async def show_laps(request: Request) -> Response:
    """The groups of workers for short and for long prompts."""
    router = router_of(request)
    return json_response(laps_status(router.membership, router.config.laps_alloc_threshold))


identity = Routes(Access.USER, "Workers")  # as routes that do not exist: a wrong key is told at once


@identity.get("/watch", hidden=True)
async def no_reports(request: Request) -> Response:
    """A router is no engine, so there are no reports: 404. It notices by the header that it asked itself."""
    answer = error_response(RouteError(404, request), request.scope["path"])
    answer.headers[ROUTER_HEADER] = router_of(request).membership.router_id
    return answer


metrics = Routes(Access.METRICS, "Health")


@metrics.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """Returns the metrics in Prometheus' text format."""
    data = generate_latest(RouterCollector(router_of(request).registry))
    return Response(data, media_type=CONTENT_TYPE_LATEST)


about = Routes(Access.USER, "About")


@about.get("/version")
async def version(request: Request) -> Response:
    """Return the version of Segue."""
    return json_response({"version": __version__})


@about.get("/openapi.json", hidden=True)
async def description(request: Request) -> Response:
    """Return the description of every route."""
    app = request.app
    return json_response(describe("Segue router", app.router.routes, app.state.root_path))
