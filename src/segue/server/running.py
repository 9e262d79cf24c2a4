"""The engine that the routes work with."""

from __future__ import annotations

from starlette.requests import Request

from segue.errors import EngineStartError
from segue.failover.life import STARTING
from segue.launch.runtime import Runtime


def runtime_of(request: Request) -> Runtime:
    """Returns the application's engine.

    Raises:
        EngineStartError: it is still starting.
    """
    runtime: Runtime | None = request.app.state.runtime
    if runtime is None:
        raise EngineStartError(STARTING)
    return runtime
