"""Routes about the workers of a router: list, register, forget and drain them, and change their roles."""

from __future__ import annotations

import time
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from segue.api.fleet import DrainRequest, RoleChanged, RoleRequest
from segue.api.schema import body_schema
from segue.api.validation import Body, parse
from segue.errors import ConfigError, InvalidRequestError, UnknownWorkerError, WorkersFailedError
from segue.messages.fleet import Register, Registration
from segue.options import check_url
from segue.router.entry import WorkerEntry
from segue.router.fan_out import WorkerReply, ask
from segue.router.router import Router, for_workers, router_of
from segue.router.status import worker_status
from segue.server.access import Access, Routes
from segue.server.raw_body import read_bytes
from segue.server.responses import json_response

MOST_MIB = 1  # of a body
ROLE_S = 10.0  # for an answer to a change of the role, besides the time that the old role's work has to end

routes = Routes(Access.ADMIN, "Workers")


@routes.get("/workers")
async def list_workers(request: Request) -> Response:
    """Every worker: who it is, how it is, and whether it gets requests."""
    registry, now = router_of(request).registry, time.monotonic()
    return json_response({"workers": [worker_status(registry, entry, now) for entry in registry]})


@routes.post("/workers", schema=body_schema(Register))
async def add_worker(request: Request) -> Response:
    """Register a worker, or renew its registration; it gets requests once it has reported."""
    router, body = router_of(request), await _body(request, Register)
    url = body.url.rstrip("/")
    try:
        check_url(url, "url")
    except ConfigError as error:
        raise InvalidRequestError(error.message, param="url") from None
    known = router.registry.at(url)
    other = router.registry.get(urlsplit(url).netloc)
    if other is not None and other is not known:
        text = f"url={url!r}: {other.url} is registered at the same host and port; remove it first"
        raise InvalidRequestError(f"{text}, by DELETE /workers/{other.id}", param="url")
    if known is not None and body.ttl_s is None:
        raise InvalidRequestError(f"url={url!r}: this worker is registered already", param="url")
    registration = Registration(url=url, cohort=body.cohort, epoch=body.epoch, role=body.role)
    entry = router.register(registration, body.ttl_s)
    status = worker_status(router.registry, entry, time.monotonic())
    return json_response(status, 201 if known is None else 200)


@routes.delete("/workers/{worker}")
async def remove_worker(request: Request) -> Response:
    """Send a worker no further requests; it is forgotten when those in flight have ended."""
    router, entry = _worker(request)
    in_flight = await router.retire(entry)
    return json_response({"id": entry.id, "in_flight": in_flight})


@routes.post("/workers/{worker}/drain", schema=body_schema(DrainRequest, required=False))
async def drain_worker(request: Request) -> Response:
    """Send a worker no further requests until this is undone; those in flight go on."""
    router, entry = _worker(request)
    entry.drain((await _body(request, DrainRequest)).drain)
    return json_response(worker_status(router.registry, entry, time.monotonic()))


@routes.post("/workers/{worker}/role", schema=body_schema(RoleRequest))
async def change_role(request: Request) -> Response:
    """Give a worker another role; it answers once the work of its old one has ended."""
    router, entry = _worker(request)
    sent = replace(await for_workers(request), path=b"/role")
    body = _parsed(sent.body, RoleRequest)
    with entry.changing():
        reply = await ask(entry, sent, body.timeout + ROLE_S)
        if reply.status is None:
            raise WorkersFailedError(f"/role failed at worker {entry.id}: {reply.problem}")
        if reply.is_ok:
            router.membership.role_changed(entry, _changed(entry, reply))
    return Response(reply.body, reply.status, {"content-type": reply.kind.decode("latin-1")})


def _changed(entry: WorkerEntry, reply: WorkerReply) -> RoleChanged:
    """Returns what a worker says of its new role; raises WorkersFailedError if it is no engine's answer."""
    try:
        return msgspec.json.decode(reply.body, type=RoleChanged)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = f"/role: the answer of worker {entry.id} is not that of an engine ({error})"
        raise WorkersFailedError(f"{text}; use one version of Segue for all") from None


def _worker(request: Request) -> tuple[Router, WorkerEntry]:
    """Returns the router, and the worker that a request's path names; raises UnknownWorkerError."""
    router, worker = router_of(request), request.path_params["worker"]
    entry = router.registry.get(worker)
    if entry is None:
        raise UnknownWorkerError(f"there is no worker {worker!r}; /workers lists them")
    return router, entry


async def _body(request: Request, kind: type[Body]) -> Body:
    """Returns a request's body; raises InvalidRequestError if it is not one of this kind."""
    return _parsed(await read_bytes(request, MOST_MIB), kind)


def _parsed(data: bytes, kind: type[Body]) -> Body:
    """Returns a body that has been read; raises InvalidRequestError if it is not one of this kind."""
    try:
        return parse(kind, msgspec.json.decode(data or b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON ({error})") from None
