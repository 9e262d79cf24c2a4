"""Whether the server can serve."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

import segue
from segue.server.errors import json_response
from segue.server.service import service_of

router = APIRouter(tags=["Health"])


@router.get("/health")
@router.get("/health_generate")
async def health(request: Request) -> Response:
    """200 while the engine serves, or is paused; 503 while it starts, and once it is dead."""
    runtime = service_of(request).running
    if runtime.died.done():
        raise runtime.died.result()
    mode = runtime.manager.stats.counters.paused
    return json_response({"status": "ok"} if mode is None else {"status": "paused", "mode": mode})


@router.get("/version")
async def version() -> Response:
    """The version of Segue."""
    return json_response({"version": segue.__version__})
