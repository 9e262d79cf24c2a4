"""Control routes of the weights: groups, sessions, the older single calls, versions, and looking."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from segue.api.validation import parse
from segue.api.weights import CALLS, perform
from segue.errors import SegueError
from segue.server.access import AdminRoute
from segue.server.body import read_json
from segue.server.errors import error_response, json_response
from segue.server.large_body import control
from segue.server.schema import body_schema, query_schema
from segue.server.service import service_of
from segue.server.sse import unless_gone
from segue.server.weight_access import admitted


class WeightRoute(AdminRoute):
    """A control route whose failures have the form of its replies."""

    def error_body(self, error: SegueError) -> dict[str, Any]:
        """What a refusal says."""
        return _failure(self.path, error)


router = APIRouter(tags=["Control"], route_class=WeightRoute)

READING = {
    "weights_update_status": ["GET"],
    "get_weights_by_name": ["GET", "POST"],
    "weights_checker": ["GET", "POST"],
}
IN_THE_REPLY = {
    "prepare_weights_update",
    "complete_weights_update",
}  # whose failures are answered with 200 too
SUMMARIES = {
    "init_weights_update_group": "Meet a trainer in a process group.",
    "destroy_weights_update_group": "Leave a group; an open session of it is aborted.",
    "prepare_weights_update": "Announce all that is going to be broadcast; `ready` once every rank receives.",
    "complete_weights_update": "Wait until all was received, then make it live.",
    "commit_weights_update": "Make live what `complete` with `commit=false` has waited for.",
    "abort_weights_update": "End the open session; the weights stay as they are.",
    "weights_update_status": "The open session, the groups, and the figures of the last update.",
    "update_weights_from_distributed": "Receive one bucket and make it live.",
    "update_weights_from_disk": "Load a checkpoint beside the served weights and make it live.",
    "update_weights_from_tensor": "Make live what the request carries, or what it points to on the GPU.",
    "begin_weight_update": "Make the single calls that follow live together.",
    "end_weight_update": "Make live what came since `begin_weight_update`.",
    "update_weight_version": "Give the served weights another name.",
    "get_weights_by_name": "The first values of a tensor, by its Hugging Face name.",
    "weights_checker": "Checksums, a snapshot, or what differs from it.",
}


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        service = service_of(request)
        try:
            model = CALLS[name].body
            check = partial(_checked, model, dict(request.query_params))
            body = await read_json(request, check, partial(control, model))
            work = perform(name, body, service.manager.ask_weights, partial(admitted, service.config))
            # Nobody but its client wants a group to be met; all else goes on without one.
            reply = await (unless_gone(request, work) if name == "init_weights_update_group" else work)
        except SegueError as error:
            return error_response(error, request.url.path, _failure(name, error))
        if reply.success and name == "get_weights_by_name":
            return json_response(reply.content["values"])
        return json_response(reply.content, 200 if reply.success or name in IN_THE_REPLY else 400)

    return endpoint


def _failure(name: str, error: SegueError) -> dict[str, Any]:
    content: dict[str, Any] = {"success": False, "message": error.message}
    return content | ({"status": "error"} if "prepare" in name else {})


def _checked(model: type[BaseModel], query: dict[str, str], body: Any) -> BaseModel:
    return parse(model, {**query, **body} if isinstance(body, dict) else body)


for _name, _call in CALLS.items():
    for _method in READING.get(_name, ("POST",)):
        router.add_api_route(
            f"/{_name}",
            _endpoint(_name),
            methods=[_method],
            summary=SUMMARIES[_name],
            openapi_extra=query_schema(_call.body)
            if _method == "GET"
            else body_schema(_call.body, required=False),
        )


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(request: Request) -> Response:
    """The name of the served weights."""
    return json_response({"weight_version": service_of(request).manager.weight_version})


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """What is served, and which weights are live."""
    return json_response(service_of(request).running.model_info())
