"""Control routes of the weights, one per operation of `segue.messages.weight_operations`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api.schema import body_schema, query_schema, reply_schema
from segue.api.validation import parse
from segue.api.weights import check_base64, reply_of
from segue.config import EngineConfig
from segue.errors import InvalidRequestError, SegueError
from segue.http_guard import is_loopback
from segue.messages.weight_operations import (
    OPERATIONS,
    GetWeights,
    JoinGroup,
    UpdateFromDisk,
    WeightOperation,
)
from segue.options import parse_list
from segue.server.access import Access, Endpoint, Routes
from segue.server.body import read_json
from segue.server.large_body import control
from segue.server.responses import error_response, json_response
from segue.server.running import runtime_of
from segue.server.sse import unless_gone


def _failure(path: str, error: SegueError) -> dict[str, Any]:
    """The body of a refusal, in the form of the route's replies."""
    content: dict[str, Any] = {"success": False, "message": error.message}
    kind = OPERATIONS.get(path[1:])
    return content | {"status": "error"} if kind and "status" in kind.reply else content


routes = Routes(Access.ADMIN, "Control", _failure)


def _endpoint(kind: type[WeightOperation]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        runtime = runtime_of(request)
        try:
            check = partial(_checked, kind, dict(request.query_params))
            operation = await read_json(request, check, partial(control, kind))
            await check_base64(operation)
            work = runtime.manager.ask_weights(operation, **limits(runtime.config, operation))
            # Only its client wants a group to be met; every other operation goes on without its client.
            answer = await (unless_gone(request, work) if kind is JoinGroup else work)
        except SegueError as error:
            return error_response(error, request.url.path, _failure(request.url.path, error))
        reply = reply_of(kind, answer)
        if answer.success and kind is GetWeights:
            return json_response(reply["values"])
        return json_response(reply, 200 if answer.success else kind.failure_status)

    return endpoint


def limits(config: EngineConfig, operation: WeightOperation) -> dict[str, Any]:
    """The limits of ``TokenizerManager.ask_weights`` that the server's options set; the ranks keep them.

    Raises:
        InvalidRequestError: whoever reaches the server could have it read any file.
    """
    if not isinstance(operation, UpdateFromDisk):
        return {}
    roots = None
    if config.weights_root is not None:
        roots = parse_list(config.weights_root, os.pathsep, "weights_root")
    elif not (config.admin_api_key or is_loopback(config.host)):
        raise InvalidRequestError(
            f"this server listens on {config.host} without an admin key, so clients may not choose what it "
            "reads: start it with --weights-root and the directories of the checkpoints, or --admin-api-key",
            param="model_path",
        )
    return {"roots": roots, "from_hub": config.weights_from_hub}


def _checked(kind: type[WeightOperation], query: dict[str, str], body: Any) -> WeightOperation:
    return parse(kind, {**query, **body} if isinstance(body, dict) else body, coerces=kind.coerces)


for _name, _kind in OPERATIONS.items():
    for _method in _kind.methods:
        _taken = query_schema(_kind) if _method == "GET" else body_schema(_kind, required=False)
        _given = reply_schema(
            None if _kind is GetWeights else {"success": True, "message": "", **_kind.reply}
        )
        routes.add(
            f"/{_name}", _endpoint(_kind), (_method,), summary=_kind.__doc__, schema={**_taken, **_given}
        )


@routes.get("/get_weight_version")
@routes.get("/weight_version")
async def weight_version(request: Request) -> Response:
    """Return the name of the served weights."""
    return json_response({"weight_version": runtime_of(request).manager.weight_version})


@routes.get("/model_info")
@routes.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """Return what is served, and the name of the served weights."""
    return json_response(runtime_of(request).model_info())
