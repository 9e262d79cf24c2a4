"""Control routes: abort, server information."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from segue.protocol.control import AbortRequest
from segue.protocol.validation import parse
from segue.server.body import read_json
from segue.server.errors import json_response
from segue.server.schema import body_schema
from segue.server.service import service_of

PATHS = frozenset({"/abort_request", "/server_info", "/get_server_info"})  # those the admin key guards

router = APIRouter(tags=["Control"])


@router.post("/abort_request", openapi_extra=body_schema(AbortRequest))
async def abort_request(request: Request) -> Response:
    """End a request, a batch, or all; an unknown rid does nothing."""
    service = service_of(request)
    body = await read_json(request, service.config.max_body_mib, lambda body: parse(AbortRequest, body))
    service.manager.abort(body.rid or "", abort_all=body.abort_all, message=body.aborted_message)
    return Response()


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Options, version, what was decided at start, and the scheduler's state."""
    return json_response(await service_of(request).running.server_info())
