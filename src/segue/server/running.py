"""The engine that the routes work with."""

from __future__ import annotations

from starlette.requests import Request

from segue.errors import EngineStartError
from segue.failover.life import STARTING
from segue.frontend.call_trace import CallTrace
from segue.launch.runtime import Runtime
from segue.server.request_ids import arrival_of


def call_trace(runtime: Runtime, request: Request, path: str, leg: str = "") -> CallTrace | None:
    """Returns the trace of a call of the route ``path``, and of a ``leg`` of that kind; None: no spans."""
    if (tracing := runtime.tracing) is None:
        return None
    scope = request.scope
    return tracing.call(scope["headers"], path, arrival_of(scope), leg)


def runtime_of(request: Request) -> Runtime:
    """Returns the application's engine.

    Raises:
        EngineStartError: it is still starting.
    """
    runtime: Runtime | None = request.app.state.runtime
    if runtime is None:
        raise EngineStartError(STARTING)
    return runtime
