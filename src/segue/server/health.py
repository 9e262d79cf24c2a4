"""Whether the server can serve."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from segue.server.access import OpenRoute
from segue.server.errors import json_response
from segue.server.service import service_of

router = APIRouter(tags=["Health"], route_class=OpenRoute)


@router.get("/health")
@router.get("/health_generate")
async def health(request: Request) -> Response:
    """200 while the engine serves, or is paused; 503 while it starts, and once it is dead or poisoned."""
    runtime = service_of(request).running
    if runtime.died.done():
        raise runtime.died.result()
    manager = runtime.manager
    weights, mode = manager.weights, manager.stats.counters.paused
    body = {"status": "ok"} if mode is None else {"status": "paused", "mode": mode}
    if weights.state != "idle":
        body["weight_update"] = weights.state
    if weights.poisoned is not None:
        return json_response(body | {"status": "poisoned", "message": weights.poisoned}, 503)
    return json_response(body)
