"""Control routes: pause, continue, abort, flush, server information."""

from __future__ import annotations

from functools import partial

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from segue.api.control import AbortRequest, FlushQuery, PauseQuery, PauseRequest
from segue.api.schema import body_schema, query_schema
from segue.api.validation import parse
from segue.messages.control import PauseMode
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.large_body import control
from segue.server.responses import json_response
from segue.server.running import runtime_of

routes = Routes(Access.ADMIN, "Control")

VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}


@routes.post("/pause_generation", schema=body_schema(PauseRequest, required=False))
async def pause_generation(request: Request) -> Response:
    """Stop generating; answers once nothing runs, with what became of the requests."""
    manager = runtime_of(request).manager
    body = await read_json(request, partial(parse, PauseRequest), partial(control, PauseRequest))
    result = await manager.pause_generation(body.pause_mode, body.ttl_s)
    said = {"message": "Generation paused successfully.", "status": "ok"}
    return json_response(said | structs.asdict(result))


@routes.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Generate again; not paused: nothing happens."""
    await runtime_of(request).manager.continue_generation()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@routes.post("/pause", schema=query_schema(PauseQuery))
async def pause(request: Request) -> Response:
    """As ``/pause_generation``, by vLLM's name and modes."""
    manager = runtime_of(request).manager
    query = parse(PauseQuery, dict(request.query_params), coerces=True)
    await manager.pause_generation(VLLM_MODES[query.mode])
    return json_response({"status": "paused"})


@routes.post("/resume")
async def resume(request: Request) -> Response:
    """As ``/continue_generation``, by vLLM's name."""
    await runtime_of(request).manager.continue_generation()
    return json_response({"status": "resumed"})


@routes.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Whether a client has paused generation, and nothing runs any more."""
    runtime = runtime_of(request)
    if runtime.died.done():
        raise runtime.died.result()
    return json_response({"is_paused": runtime.manager.stats.counters.is_paused})


@routes.post("/abort_request", schema=body_schema(AbortRequest, required=False))
async def abort_request(request: Request) -> Response:
    """End a request, a batch, or all; an unknown rid does nothing."""
    manager = runtime_of(request).manager
    body = await read_json(request, partial(parse, AbortRequest), partial(control, AbortRequest))
    manager.abort(body.rid or "", abort_all=body.abort_all, message=body.aborted_message)
    return Response()


@routes.get("/flush_cache", schema=query_schema(FlushQuery))
@routes.post("/flush_cache", schema=query_schema(FlushQuery))
async def flush_cache(request: Request) -> Response:
    """Forget all cached KV; refused while a live request owns some, or while requests run or wait."""
    manager = runtime_of(request).manager
    query = parse(FlushQuery, dict(request.query_params), coerces=True)
    flushed = await manager.flush_cache(query.timeout)
    if flushed.success:
        return Response(f"Cache flushed.\nFlushed items: {flushed.flushed_items}\n", media_type="text/plain")
    return Response(f"Cache not flushed.\nReason: {flushed.error_msg}\n", 400, media_type="text/plain")


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Options, version, what was decided at start, and the scheduler's state."""
    return json_response(await runtime_of(request).server_info())
