"""Whether the server can serve. Only ``/health_generate`` asks the worker, and it has a time limit."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Any

from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response

from segue.api.schema import reply_schema
from segue.api.shapes import HealthError, StatusReply
from segue.errors import EngineHungError, OverloadedError, PausedError, SegueError
from segue.frontend.request import MAX_PRIORITY, GenerateRequest
from segue.frontend.sampling_options import SamplingOptions
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.launch.runtime import Runtime
from segue.server.access import Access, Routes
from segue.server.responses import HEADERS, json_response, native_body
from segue.server.running import runtime_of

STATUSES = {
    "engine_not_ready": "starting",
    "engine_dead": "dead",
    "engine_hung": "hung",
    "draining": "draining",
    "weights_poisoned": "poisoned",
    "weights_released": "released",
}
FRESH_S = 1.0  # a step that ended less than this ago shows that the engine generates
POLL_S = 0.02
RETRY_S = 0.2  # before another try for a token, if the queue was full or a client aborted all requests
ONE_TOKEN = SamplingOptions(max_tokens=1, temperature=0.0, ignore_eos=True)


def _unable(error: SegueError, path: str) -> Response:
    """Answers 503, and says why the server cannot serve."""
    status = STATUSES.get(error.code or "", "failing")
    return json_response({"status": status} | native_body(error) | {"code": 503}, 503, HEADERS[503])


routes = Routes(Access.OPEN, "Health", _unable, HealthError)
_STATUS = reply_schema(StatusReply)


@routes.get("/health", schema=_STATUS)
@routes.get("/ready", schema=_STATUS)
@routes.get("/ping", schema=_STATUS)
async def health(request: Request) -> Response:
    """200 while requests are taken, also paused, updating or busy; else 503, and why."""
    return json_response(_condition(runtime_of(request)))


@routes.get("/health_generate", schema=_STATUS)
async def health_generate(request: Request) -> Response:
    """As ``/health``, and a token is generated, unless that is known to work or may not be."""
    runtime = runtime_of(request)
    _condition(runtime)
    await _generates(request.app.state, runtime)
    return json_response(_condition(runtime))


def _condition(runtime: Runtime) -> dict[str, Any]:
    """What the engine does.

    Raises:
        SegueError: it cannot serve.
    """
    if (trouble := runtime.trouble) is not None:
        raise trouble
    manager = runtime.manager
    counters = manager.stats.counters
    paused = {} if counters.paused is None else {"status": "paused", "mode": counters.paused}
    update = {} if manager.weights.state == "idle" else {"weight_update": manager.weights.state}
    requests = {"num_requests": manager.num_requests} if manager.num_requests else {}
    released = {"released": counters.released} if counters.released else {}
    owner = {"owner_lost": True} if runtime.owner_lost else {}
    return {"status": "ok"} | paused | released | update | requests | owner


# --- does the engine generate? ---


async def _generates(state: State, runtime: Runtime) -> None:
    """Return once a step has ended, or if one ended lately, or if no step may run.

    The calls need no API key. So concurrent calls share one check: there is at most one probe request at a
    time, and none within a second of the end of a step.

    Raises:
        SegueError: the engine cannot serve, or the probe request failed.
        EngineHungError: no step ended within ``--stall-s``.
    """
    if state.step_check is None or state.step_check.done():
        state.step_check = asyncio.create_task(_wait_for_step(runtime))
        # Retrieve an error even if every client has gone: asyncio would log it.
        state.step_check.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.shield(state.step_check)


async def _wait_for_step(runtime: Runtime) -> None:
    """Wait until a step has ended, and send a probe request meanwhile, so that there is a step.

    A step that ended within the last second counts. A probe that was refused is sent again. Raises what
    :func:`_generates` documents.
    """
    manager, began = runtime.manager, time.monotonic()
    token: asyncio.Task[None] | None = None
    try:
        while manager.stats.last_step_at < began - FRESH_S:
            if {"mode", "weight_update"} & _condition(runtime).keys():
                return  # paused or updating: no step can be expected
            if time.monotonic() - began > runtime.config.stall_s:
                raise EngineHungError(
                    f"the engine has ended no step for {runtime.config.stall_s:g} s (--stall-s); "
                    "look at its log, and restart the engine if this persists"
                )
            if token is None or token.done():
                token = asyncio.create_task(_generate_token(manager))
            await asyncio.wait({token}, timeout=POLL_S)
            if token.done():
                token.result()
    finally:
        if token is not None:
            token.cancel()


async def _generate_token(manager: TokenizerManager) -> None:
    """Generate one token, ahead of the queue.

    It is no error if the engine has no room for the request: then others run, and the end of one of their
    steps is the sign of life.
    """
    request = GenerateRequest(
        rid=f"health-{uuid.uuid4().hex}", prompt=[0], options=ONE_TOKEN, priority=MAX_PRIORITY
    )
    with suppress(OverloadedError, PausedError), await manager.submit([request]) as call:
        if (await call.outputs())[0].token_ids:
            return
    await asyncio.sleep(RETRY_S)  # there was no room, or a client aborted all requests
