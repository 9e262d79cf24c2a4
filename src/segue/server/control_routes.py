"""Control routes: pause, continue, abort, flush, server information."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec import structs

from segue.api.control import AbortRequest, FlushQuery, PauseQuery, PauseRequest
from segue.api.validation import parse
from segue.messages.control import PauseMode
from segue.server.access import AdminRoute
from segue.server.body import read_json
from segue.server.errors import json_response
from segue.server.large_body import control
from segue.server.schema import body_schema, query_schema
from segue.server.service import service_of

router = APIRouter(tags=["Control"], route_class=AdminRoute)

VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}


@router.post("/pause_generation", openapi_extra=body_schema(PauseRequest, required=False))
async def pause_generation(request: Request) -> Response:
    """Stop generating; answers once nothing runs, with what became of the requests."""
    manager = service_of(request).manager
    body = await read_json(request, partial(parse, PauseRequest), partial(control, PauseRequest))
    result = await manager.pause_generation(body.mode, body.ttl_s)
    said = {"message": "Generation paused successfully.", "status": "ok"}
    return json_response(said | structs.asdict(result))


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Generate again; not paused: nothing happens."""
    await service_of(request).manager.continue_generation()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@router.post("/pause", openapi_extra=query_schema(PauseQuery))
async def pause(request: Request) -> Response:
    """As ``/pause_generation``, by vLLM's name and modes."""
    manager = service_of(request).manager
    query = parse(PauseQuery, dict(request.query_params))
    await manager.pause_generation(VLLM_MODES[query.mode])
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """As ``/continue_generation``, by vLLM's name."""
    await service_of(request).manager.continue_generation()
    return json_response({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Whether a client has paused generation, and nothing runs any more."""
    runtime = service_of(request).running
    if runtime.died.done():
        raise runtime.died.result()
    return json_response({"is_paused": runtime.manager.stats.counters.is_paused})


@router.post("/abort_request", openapi_extra=body_schema(AbortRequest, required=False))
async def abort_request(request: Request) -> Response:
    """End a request, a batch, or all; an unknown rid does nothing."""
    manager = service_of(request).manager
    body = await read_json(request, partial(parse, AbortRequest), partial(control, AbortRequest))
    manager.abort(body.rid or "", abort_all=body.abort_all, message=body.aborted_message)
    return Response()


@router.get("/flush_cache", openapi_extra=query_schema(FlushQuery))
@router.post("/flush_cache", openapi_extra=query_schema(FlushQuery))
async def flush_cache(request: Request) -> Response:
    """Forget all cached KV; refused while a live request owns some, or while requests run or wait."""
    manager = service_of(request).manager
    query = parse(FlushQuery, dict(request.query_params))
    flushed = await manager.flush_cache(query.timeout)
    if flushed.success:
        return Response(f"Cache flushed.\nFlushed items: {flushed.flushed_items}\n", media_type="text/plain")
    return Response(f"Cache not flushed.\nReason: {flushed.error_msg}\n", 400, media_type="text/plain")


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Options, version, what was decided at start, and the scheduler's state."""
    return json_response(await service_of(request).running.server_info())
