"""Whether the router can serve, which it can while workers take requests, and whether it is alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api.shapes import HealthError
from segue.errors import SegueError
from segue.router.choice import Refuse
from segue.router.entry import WorkerEntry
from segue.router.fan_out import WorkerRequest, ask_all, failures
from segue.router.fleet import ALL_ROUTES, ROUTES_HEADER
from segue.router.router import Router, router_of
from segue.server.access import Access, Routes
from segue.server.responses import HEADERS, json_response, native_body

GENERATE_S = 35.0  # for a worker to generate a token; by default it gives up itself after 30 s


def _unable(error: SegueError, path: str) -> Response:
    """Answers 503, and says why the router cannot serve."""
    return json_response({"status": "failing"} | native_body(error), error.status, HEADERS.get(error.status))


routes = Routes(Access.OPEN, "Health", _unable, HealthError)


@routes.get("/health")
@routes.get("/ready")
@routes.get("/ping")
async def is_healthy(request: Request) -> Response:
    """200 while a worker or a pair takes requests, or keeps them in a pause; else 503, and why none does."""
    router = router_of(request)
    routes = {ROUTES_HEADER: ALL_ROUTES} if router.registry.has_all_routes else None
    return json_response(_condition(router), headers=routes)


@routes.get("/live")
async def is_alive(request: Request) -> Response:
    """200 as long as the router answers, also without workers and while it drains: it needs no restart."""
    return json_response({"status": "live"})


@routes.get("/health_generate")
async def generates(request: Request) -> Response:
    """As ``/health``, and each of these workers generates a token unless it is paused; 200 if one does."""
    router, state = router_of(request), request.app.state
    _condition(router)
    # The call needs no key, so concurrent calls share one check.
    if state.token_check is None or state.token_check.done():
        state.token_check = asyncio.create_task(_generates(router))
        state.token_check.add_done_callback(lambda task: task.cancelled() or task.exception())
    return json_response(await asyncio.shield(state.token_check))


def _condition(router: Router) -> dict[str, Any]:
    """Returns how many workers serve, and are paused; raises NoWorkerError if these can do no request."""
    router.check_open()
    now = time.monotonic()
    reasons = {entry.id: entry.why_not(now) for entry in router.registry}
    serving = [entry for entry in router.registry if reasons[entry.id] is None]
    paused = [entry for entry in router.registry if entry.only_paused(now)]
    if problem := _lacking([*serving, *paused]):
        named = [(worker, reason) for worker, reason in reasons.items() if reason is not None]
        raise Refuse(problem=problem if reasons else "no worker is registered", reasons=named).error()
    status = "paused" if _lacking(serving) else "ok"
    counts = {"workers": len(reasons), "serving": len(serving)}
    return {"status": status} | counts | ({"paused": len(paused)} if paused else {})


def _lacking(entries: Iterable[WorkerEntry]) -> str:
    """Returns what workers lack to do a request together; "": nothing."""
    roles = {entry.view.record.role for entry in entries if entry.view is not None}
    if "both" in roles or roles >= {"prefill", "decode"}:
        return ""
    if not roles:
        return "no worker takes requests"
    return f"no {'decode' if 'prefill' in roles else 'prefill'} worker takes requests"


async def _generates(router: Router) -> dict[str, Any]:
    """Ask the workers that serve for a token; raises NoWorkerError if none of them generates it.

    A worker that is paused says that it is well without generating one.
    """
    now = time.monotonic()
    serving = [entry for entry in router.registry if entry.why_not(now) is None or entry.only_paused(now)]
    sent = WorkerRequest(method=b"GET", path=b"/health_generate", headers=[])
    replies = await ask_all(serving, sent, GENERATE_S)
    failed = failures(replies)
    if len(failed) == len(replies):
        raise Refuse(problem="no worker generates a token", reasons=list(failed.items())).error()
    return _condition(router) | {"well": len(replies) - len(failed), "failed": failed}
