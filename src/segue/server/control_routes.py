"""Control routes: pause, continue, abort, flush, memory, and the operations on weights."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from segue.api.control import (
    AbortRequest,
    FlushQuery,
    MemoryRequest,
    PauseRequest,
    memory_reply,
)
from segue.api.profile import ProfileRequest
from segue.api.schema import body_schema, query_schema, reply_schema, text_schema
from segue.api.shapes import MemoryReply, MessageReply, PauseReply, SuccessReply, TracesReply, WeightError
from segue.api.validation import parse
from segue.api.weights import check_base64, reply_of
from segue.config import EngineConfig
from segue.errors import InvalidRequestError
from segue.http_guard import is_loopback
from segue.messages.weight_operations import (
    OPERATIONS,
    GetWeights,
    JoinGroup,
    UpdateFromDisk,
    WeightOperation,
)
from segue.messages.weight_update import WeightAnswer
from segue.options import parse_list
from segue.server.access import Access, Endpoint, Routes
from segue.server.body import read_json
from segue.server.large_control import control
from segue.server.responses import json_response, unless_gone, weight_error_response
from segue.server.running import runtime_of

routes = Routes(Access.ADMIN, "Control")


_MEMORY = body_schema(MemoryRequest, required=False) | reply_schema(MemoryReply)
_FLUSH = query_schema(FlushQuery) | text_schema("text/plain", 200, 400)


@routes.post("/pause_generation", schema=body_schema(PauseRequest, required=False) | reply_schema(PauseReply))
async def pause_generation(request: Request) -> Response:
    """Stop generating; answers once nothing runs, with what became of the requests."""
    runtime = runtime_of(request)
    body = await read_json(request, partial(parse, PauseRequest), partial(control, PauseRequest))
    result = await runtime.pause_generation(body.pause_mode, body.ttl_s)
    said = {"message": "Generation paused successfully.", "status": "ok"}
    return json_response(said | structs.asdict(result))


@routes.post("/continue_generation", schema=reply_schema(MessageReply))
async def continue_generation(request: Request) -> Response:
    """Generate again; not paused: nothing happens."""
    await runtime_of(request).continue_generation()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@routes.post("/abort_request", schema=body_schema(AbortRequest, required=False))
async def abort_request(request: Request) -> Response:
    """End a request, a batch, or all; an unknown rid does nothing."""
    manager = runtime_of(request).manager
    body = await read_json(request, partial(parse, AbortRequest), partial(control, AbortRequest))
    manager.abort(body.rid or "", abort_all=body.abort_all, message=body.message)
    return Response()


@routes.get("/flush_cache", schema=_FLUSH)
@routes.post("/flush_cache", schema=_FLUSH)
async def flush_cache(request: Request) -> Response:
    """Forget all cached KV; refused while a live request owns some, or while requests run or wait."""
    manager = runtime_of(request).manager
    query = parse(FlushQuery, dict(request.query_params), coerces=True)
    flushed = await manager.calls.flush_cache(query.timeout)
    if flushed.success:
        return Response(f"Cache flushed.\nFlushed items: {flushed.flushed_items}\n", media_type="text/plain")
    return Response(f"Cache not flushed.\nReason: {flushed.error_msg}\n", 400, media_type="text/plain")


@routes.post("/release_memory_occupation", schema=_MEMORY)
async def release_memory_occupation(request: Request) -> Response:
    """Give the memory of weights or KV cache back; running requests are retracted, and all requests wait."""
    manager = runtime_of(request).manager
    body = await read_json(request, partial(parse, MemoryRequest), partial(control, MemoryRequest))
    return json_response(memory_reply(await manager.calls.release_memory(body.memory)))


@routes.post("/resume_memory_occupation", schema=_MEMORY)
async def resume_memory_occupation(request: Request) -> Response:
    """Take released memory again; weights are then sent or loaded before anything is generated."""
    manager = runtime_of(request).manager
    body = await read_json(request, partial(parse, MemoryRequest), partial(control, MemoryRequest))
    return json_response(memory_reply(await manager.calls.resume_memory(body.memory)))


# --- profiles ---


@routes.post(
    "/start_profile", schema=body_schema(ProfileRequest, required=False) | reply_schema(SuccessReply)
)
async def start_profile(request: Request) -> Response:
    """Trace steps with torch's profiler, until ``/stop_profile`` or for so many steps."""
    runtime = runtime_of(request)
    body = await read_json(request, partial(parse, ProfileRequest), partial(control, ProfileRequest))
    await runtime.manager.calls.start_profile(
        body.path(runtime.config.profile_dir),
        body.activities or ["CPU", "GPU"],
        num_steps=body.num_steps,
        with_stack=bool(body.with_stack),
        record_shapes=bool(body.record_shapes),
    )
    return json_response({"success": True, "message": "Steps are traced."})


@routes.post("/stop_profile", schema=reply_schema(TracesReply))
async def stop_profile(request: Request) -> Response:
    """Trace no more, and write a trace per rank; answers once they are written, with their paths."""
    files = await runtime_of(request).manager.calls.stop_profile()
    return json_response({"success": True, "message": "The traces are written.", "files": files})


# --- weights: one route per operation of `segue.messages.weight_operations` ---


weights = Routes(Access.ADMIN, "Control", weight_error_response, WeightError)


def _endpoint(kind: type[WeightOperation]) -> Endpoint:
    """Returns the endpoint of an operation on weights: check the body, ask the workers, answer."""

    async def endpoint(request: Request) -> Response:
        # Fields may come in the query as well as in the body. The operation's docstring becomes this one's.
        check = partial(_checked, kind, dict(request.query_params))
        operation = await read_json(request, check, partial(control, kind))
        answer = await ask_weights(request, operation)
        reply = reply_of(kind, answer)
        if answer.success and kind is GetWeights:
            return json_response(reply["values"])
        return json_response(reply, 200 if answer.success else kind.failure_status)

    endpoint.__doc__ = kind.__doc__
    return endpoint


async def ask_weights(request: Request, operation: WeightOperation) -> WeightAnswer:
    """Have the workers perform an operation, within what the server's options allow; returns their answer.

    Raises:
        InvalidRequestError: a payload is not base64, or a path must not be read.
    """
    runtime = runtime_of(request)
    await check_base64(operation)
    if runtime.tracing is not None and not isinstance(operation, GetWeights):
        runtime.tracing.note_update_call(request.scope["headers"])
    work = runtime.manager.calls.ask_weights(operation, **limits(runtime.config, operation))
    # Only its client wants a group to be met; every other operation goes on without its client.
    return await (unless_gone(request, work) if isinstance(operation, JoinGroup) else work)


def limits(config: EngineConfig, operation: WeightOperation) -> dict[str, Any]:
    """Returns what the server's options allow an operation to read, as arguments of ``ask_weights``.

    Only an update from disk reads files: ``roots`` are the directories allowed (None: any), ``from_hub``
    says whether the model may come from the hub. Each rank checks them when it reads.

    Raises:
        InvalidRequestError: whoever reaches the server could have it read any file.
    """
    if not isinstance(operation, UpdateFromDisk):
        return {}
    roots = None
    if config.weights_root is not None:
        roots = parse_list(config.weights_root, "weights_root", os.pathsep)
    elif not (config.admin_api_key or is_loopback(config.host)):
        raise InvalidRequestError(
            f"this server listens on {config.host} without an admin key, so clients may not choose what it "
            "reads: start it with --weights-root and the directories of the checkpoints, or --admin-api-key",
            param="model_path",
        )
    return {"roots": roots, "from_hub": config.weights_from_hub}


def _checked(kind: type[WeightOperation], query: dict[str, str], body: Any) -> WeightOperation:
    """Returns the operation that a body and the query ask for; the body's fields have priority.

    Raises InvalidRequestError, or UnsupportedFieldError, for a wrong field.
    """
    return parse(kind, {**query, **body} if isinstance(body, dict) else body, coerces="GET" in kind.methods)


for _name, _kind in OPERATIONS.items():
    for _method in _kind.methods:
        _taken = query_schema(_kind) if _method == "GET" else body_schema(_kind, required=False)
        _fields = {"success": bool, "message": str} | {n: type(value) for n, value in _kind.reply.items()}
        _reply = msgspec.defstruct(f"{_kind.__name__}Reply", list(_fields.items()))
        _given = reply_schema(list[Any] if _kind is GetWeights else _reply)
        weights.add(_method, f"/{_name}", _endpoint(_kind), schema={**_taken, **_given})


routes += weights
