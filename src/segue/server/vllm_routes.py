"""vLLM's names for control calls: pausing, aborting, the prefix cache, memory, and updates of the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api.control import MemoryRequest, PauseQuery, SleepQuery, memory_of_level, memory_reply
from segue.api.schema import body_schema, query_schema, reply_schema
from segue.api.shapes import (
    AbortedReply,
    MemoryReply,
    PausedReply,
    SleepingReply,
    StatusReply,
    SuccessReply,
    UpdateReply,
    WeightError,
)
from segue.api.validation import Body, parse
from segue.api.vllm import AbortRequests, FinishUpdate, ResetPrefixCache, UpdateWeights
from segue.api.weights import reply_of
from segue.messages.weight_operations import BeginUpdate, WeightOperation
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.control_routes import ask_weights
from segue.server.large_control import control
from segue.server.responses import json_response, weight_error_response
from segue.server.running import runtime_of

routes = Routes(Access.ADMIN, "Control")
weights = Routes(Access.ADMIN, "Control", weight_error_response, WeightError)
_ABORT = body_schema(AbortRequests, required=False) | reply_schema(AbortedReply)
_FINISH = body_schema(FinishUpdate, required=False) | reply_schema(UpdateReply)


@routes.post("/pause", schema=query_schema(PauseQuery) | reply_schema(StatusReply))
async def pause(request: Request) -> Response:
    """As ``/pause_generation``, by vLLM's name and modes; then the prefix cache is emptied."""
    runtime = runtime_of(request)
    query = parse(PauseQuery, dict(request.query_params), coerces=True)
    await runtime.pause_generation(query.pause_mode)
    if not query.clears_cache:
        return json_response({"status": "paused"})
    flushed = await runtime.manager.calls.flush_cache()
    reply = {"status": "paused", "cache_cleared": flushed.success}
    return json_response(reply if flushed.success else reply | {"message": flushed.error_msg})


@routes.post("/resume", schema=reply_schema(StatusReply))
async def resume(request: Request) -> Response:
    """As ``/continue_generation``, by vLLM's name."""
    await runtime_of(request).continue_generation()
    return json_response({"status": "resumed"})


@routes.get("/is_paused", schema=reply_schema(PausedReply))
async def is_paused(request: Request) -> Response:
    """Whether a client has paused generation, and nothing runs any more."""
    runtime = runtime_of(request)
    if runtime.died.done():
        raise runtime.died.result()
    return json_response({"is_paused": runtime.manager.stats.counters.is_paused})


@routes.post("/abort_requests", schema=_ABORT)
async def abort_requests(request: Request) -> Response:
    """End the requests of these ids, or all; unknown ids do nothing. ``aborted`` counts those in flight."""
    manager = runtime_of(request).manager
    body = await _body(request, AbortRequests)
    if body.request_ids:
        count = manager.num_of(body.request_ids)
        for rid in body.request_ids:
            manager.abort(rid)
    else:
        count = manager.num_requests
        manager.abort(abort_all=True)
    return json_response({"status": "aborted", "aborted": count})


@routes.post("/reset_prefix_cache", schema=query_schema(ResetPrefixCache) | reply_schema(SuccessReply))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached KV; ``success`` is false while a request owns some, unless it is to give it back."""
    body = await _fields(request, ResetPrefixCache, dict(request.query_params))
    flushed = await runtime_of(request).manager.calls.flush_cache(retract=body.reset_running_requests)
    message = f"{flushed.flushed_items} tokens were forgotten." if flushed.success else flushed.error_msg
    return json_response({"success": flushed.success, "message": message})


@routes.post("/sleep", schema=query_schema(SleepQuery) | reply_schema(MemoryReply))
async def sleep(request: Request) -> Response:
    """As ``/release_memory_occupation``, by vLLM's name and levels."""
    manager = runtime_of(request).manager
    level = (await _fields(request, SleepQuery, dict(request.query_params))).level
    tags, backup = memory_of_level(level, manager.ready.device)
    return json_response(memory_reply(await manager.calls.release_memory(tags, backup=backup)))


@routes.post("/wake_up", schema=query_schema(MemoryRequest) | reply_schema(MemoryReply))
async def wake_up(request: Request) -> Response:
    """As ``/resume_memory_occupation``, by vLLM's name; ``tags`` may be given several times."""
    manager = runtime_of(request).manager
    tags = request.query_params.getlist("tags")
    body = await _fields(request, MemoryRequest, {"tags": tags} if tags else {})
    return json_response(memory_reply(await manager.calls.resume_memory(body.memory)))


@routes.get("/is_sleeping", schema=reply_schema(SleepingReply))
async def is_sleeping(request: Request) -> Response:
    """Whether any memory is released."""
    runtime = runtime_of(request)
    if runtime.died.done():
        raise runtime.died.result()
    return json_response({"is_sleeping": bool(runtime.manager.stats.counters.released)})


# --- weights ---


@weights.post("/start_weight_update", schema=reply_schema(UpdateReply))
async def start_weight_update(request: Request) -> Response:
    """As ``/begin_weight_update``, by vLLM's name."""
    return await _update(request, BeginUpdate())


@weights.post("/update_weights", schema=body_schema(UpdateWeights) | reply_schema(UpdateReply))
async def update_weights(request: Request) -> Response:
    """Receive tensors, or load a directory; served at once, or at the end of a begun update."""
    return await _update(request, (await _body(request, UpdateWeights)).operation())


@weights.post("/finish_weight_update", schema=_FINISH)
async def finish_weight_update(request: Request) -> Response:
    """As ``/end_weight_update``, by vLLM's name."""
    return await _update(request, (await _body(request, FinishUpdate)).operation())


async def _update(request: Request, operation: WeightOperation) -> Response:
    """Returns the answer to an operation on weights; its ``status`` is what prime-rl's server answers."""
    answer = await ask_weights(request, operation)
    reply: dict[str, Any] = reply_of(type(operation), answer)
    return json_response(
        reply | {"status": "ok"} if answer.success else reply, 200 if answer.success else 400
    )


async def _fields(request: Request, kind: type[Body], query: dict[str, Any]) -> Body:
    """Returns the fields of a call's query and of its body, where SkyRL sends them; the body's come first."""

    def check(body: Any) -> Body:
        return parse(kind, query | body if isinstance(body, dict) else body, coerces=True)

    return await read_json(request, check, partial(control, kind))


async def _body(request: Request, kind: type[Body]) -> Body:
    return await read_json(request, partial(parse, kind), partial(control, kind))


routes += weights
