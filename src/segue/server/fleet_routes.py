"""Routes for routers and operators of several engines: ``/watch``, ``/role`` and ``/drain``.

``/watch`` is one long reply, from which a router learns who this engine is and how much work it has.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from contextlib import suppress
from functools import partial

import msgspec
from msgspec import structs
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from segue.api.fleet import DrainRequest, RoleChanged, RoleRequest
from segue.api.schema import body_schema, reply_schema, text_schema
from segue.api.shapes import DrainReply
from segue.api.validation import parse
from segue.errors import SegueError
from segue.failover.life import LifeState
from segue.host import boot_id
from segue.launch.runtime import Runtime
from segue.messages.control import EngineLoad
from segue.messages.fleet import REPORT_PERIOD_S, WorkerRecord, WorkerReport, WorkerState
from segue.server.access import Access, Routes
from segue.server.body import read_json
from segue.server.large_control import control
from segue.server.responses import encode, json_response, unless_gone
from segue.server.running import runtime_of
from segue.tls import scheme_of

LINES = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
STATES: dict[str, WorkerState] = {  # by code of the trouble
    "draining": "draining",
    "engine_dead": "dead",
    "engine_not_ready": "starting",
}

routes = Routes(Access.ADMIN, "Fleet")


@routes.get("/watch", schema=text_schema("application/x-ndjson"))
async def watch(request: Request) -> ASGIApp:
    """Lines of JSON until the engine ends: a WorkerRecord, then a WorkerReport each 100 ms."""
    runtime = runtime_of(request)
    if runtime.died.done() and (trouble := runtime.trouble) is not None:
        raise trouble  # a router would take reports that end at once for those of an engine that came back
    return Watch(runtime, await asyncio.to_thread(record_of, runtime))


@routes.post("/role", schema=body_schema(RoleRequest) | reply_schema(RoleChanged), errors=[409])
async def set_role(request: Request) -> Response:
    """Take other work: answers once what is left of the old role has ended, or 409 if it has not in time."""
    manager = runtime_of(request).manager
    body = await read_json(request, partial(parse, RoleRequest), partial(control, RoleRequest))
    await manager.calls.set_role(body.role, body.timeout)
    return json_response(RoleChanged(role=manager.role, kv_address=manager.control_address))


@routes.post("/drain", schema=body_schema(DrainRequest, required=False) | reply_schema(DrainReply))
async def drain(request: Request) -> Response:
    """Refuse new requests, while those in flight go on; with ``drain`` false, take requests again."""
    runtime = runtime_of(request)
    body = await read_json(request, partial(parse, DrainRequest), partial(control, DrainRequest))
    runtime.set_drained(body.drain)
    return json_response({"drain": body.drain, "num_requests": runtime.manager.num_requests})


def record_of(runtime: Runtime) -> WorkerRecord:
    """Returns who this engine is. The first call may read the tokenizer's file."""
    config, ready, limits = runtime.config, runtime.manager.ready, runtime.manager.ready.limits
    shape = encode(msgspec.to_builtins(runtime.source.config, enc_hook=str))
    host = config.host if ":" not in config.host else f"[{config.host}]"
    return WorkerRecord(
        worker_id=f"{socket.gethostname()}-{os.getpid()}",
        url=f"{scheme_of(config)}://{host}:{config.port}",
        cohort=config.cohort if runtime.epoch else "",
        epoch=runtime.epoch,
        incarnation=runtime.incarnation,
        boot_id=boot_id(),
        kv_address=runtime.manager.control_address or "",
        role=runtime.manager.role,
        model=hashlib.sha256(shape).hexdigest(),
        tokenizer=runtime.source.tokenizer_digest(),
        page_size=limits.page_size,
        max_seq_len=limits.max_seq_len,
        kv_bytes_per_token=config.tp * ready.kv_bytes // (limits.num_pages * limits.page_size),
    )


def report_of(runtime: Runtime, load: EngineLoad) -> WorkerReport:
    """Returns how the engine is, with the last answer of its scheduler."""
    trouble = runtime.trouble
    state: WorkerState = "active" if trouble is None else STATES.get(trouble.code or "", "active")
    return WorkerReport(
        epoch=runtime.epoch,
        state=state,
        paused=runtime.manager.stats.counters.paused is not None,
        trouble="" if trouble is None else trouble.message,
        heartbeat_age_s=max(runtime.heartbeat_ages, default=0.0),
        load=load.load,
        coefficients=load.coefficients,
        identity=load.identity,
        num_flushes=load.num_flushes,
        refused=load.refused,
    )


class Watch:
    """An ASGI application that sends the lines until the engine ends, or the server has shut down.

    A scheduler in a long step answers late. Its last answer is sent again meanwhile, because the report also
    says that the server lives, and how old the scheduler's heartbeat is.
    """

    def __init__(self, runtime: Runtime, record: WorkerRecord) -> None:
        self._runtime = runtime
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines; return when there are no more, or the router has disconnected."""
        with suppress(ClientDisconnect, OSError):
            await unless_gone(Request(scope, receive), self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": LINES})
        await self._send_line(send, self._record)
        asked, load = asyncio.ensure_future(self._runtime.manager.calls.get_load()), None
        due = time.monotonic()
        try:
            while not self._is_over():
                due = max(due + REPORT_PERIOD_S, time.monotonic())
                await asyncio.wait({asked}, timeout=due - time.monotonic() if load else None)
                if asked.done():
                    with suppress(SegueError):  # hung or dead: then the report says so
                        load = asked.result()
                    asked = asyncio.ensure_future(self._runtime.manager.calls.get_load())
                manager = self._runtime.manager
                if manager.role != self._record.role:
                    address = manager.control_address or ""
                    self._record = structs.replace(self._record, role=manager.role, kv_address=address)
                    await self._send_line(send, self._record)
                if load is not None:
                    await self._send_line(send, report_of(self._runtime, load))
                await asyncio.sleep(due - time.monotonic())
        finally:
            asked.cancel()
            with suppress(SegueError, asyncio.CancelledError):
                await asked
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_over(self) -> bool:
        """Whether nothing more will come of this engine: it has ended, or shuts down and has no request."""
        shuts_down = self._runtime.life.state is LifeState.DRAINING
        return self._runtime.died.done() or (shuts_down and not self._runtime.manager.num_requests)

    async def _send_line(self, send: Send, line: WorkerRecord | WorkerReport) -> None:
        await send({"type": "http.response.body", "body": encode(line) + b"\n", "more_body": True})
