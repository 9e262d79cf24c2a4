"""Whether the server can serve. Only ``/health_generate`` asks the worker, and it has a time limit."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.errors import SegueError
from segue.server.access import Access, Routes
from segue.server.responses import HEADERS, json_response, native_body
from segue.server.service import Service, service_of

routes = Routes(Access.OPEN, "Health")

STATUSES = {
    "engine_not_ready": "starting",
    "engine_dead": "dead",
    "engine_hung": "hung",
    "draining": "draining",
    "weights_poisoned": "poisoned",
}


@routes.get("/health")
@routes.get("/ready")
@routes.get("/ping")
async def health(request: Request) -> Response:
    """200 while requests are taken, also paused, updating or busy; else 503, and why."""
    service = service_of(request)
    try:
        return json_response(_condition(service))
    except SegueError as error:
        return _unable(error)


@routes.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """As ``/health``, and a token is generated, unless that is known to work or may not be."""
    service = service_of(request)
    try:
        _condition(service)
        await service.probe.generates()
        return json_response(_condition(service))
    except SegueError as error:
        return _unable(error)


def _condition(service: Service) -> dict[str, Any]:
    """What the engine does.

    Raises:
        SegueError: it cannot serve.
    """
    runtime = service.running
    if (trouble := runtime.trouble) is not None:
        raise trouble
    manager = runtime.manager
    counters = manager.stats.counters
    paused = {} if counters.paused is None else {"status": "paused", "mode": counters.paused}
    update = {} if manager.weights.state == "idle" else {"weight_update": manager.weights.state}
    requests = {"num_requests": manager.num_requests} if manager.num_requests else {}
    return {"status": "ok"} | paused | update | requests


def _unable(error: SegueError) -> Response:
    status = STATUSES.get(error.code or "", "failing")
    return json_response({"status": status} | native_body(error) | {"code": 503}, 503, HEADERS[503])
