"""Weight routes of the router: a router of one worker forwards them, any other one refuses them.

An operation on weights belongs to one engine: it names the engine's ranks in a process group, or a session
that the engine keeps. So a client with several workers talks to each of them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from segue.api.schema import body_schema, query_schema
from segue.api.shapes import WeightError
from segue.api.vllm import FinishUpdate, UpdateWeights
from segue.errors import NoWorkerError, SeveralWorkersError
from segue.messages.weight_operations import OPERATIONS
from segue.router.control_routes import addressed_by
from segue.router.fan_out import ask, failed_over
from segue.router.router import for_workers, router_of
from segue.server.access import Access, Routes
from segue.server.responses import unless_gone, weight_error_response

routes = Routes(Access.ADMIN, "Weights", weight_error_response, WeightError)


async def forward(request: Request) -> Response:
    """Forward an operation on weights to the only worker; a router of several refuses it."""
    router, path = router_of(request), request.scope["path"]
    workers = addressed_by(router, path)
    if len(workers) > 1:
        raise SeveralWorkersError(
            f"{path}: this router has {len(workers)} workers, and each of them takes weights by itself; send "
            "this to the URLs that GET /workers lists, or use WeightSender(ROUTER_URL, …), which does so"
        )
    reply = await unless_gone(request, ask(workers[0], await for_workers(request), None))
    if reply.status is None:
        problem = f"{path} failed at worker {workers[0].id}: {reply.problem}"
        raise failed_over(problem) if reply.is_failed_over else NoWorkerError(problem)
    return Response(reply.body, reply.status, {"content-type": reply.kind.decode("latin-1")})


for _path, _taken in (
    ("/start_weight_update", {}),
    ("/update_weights", body_schema(UpdateWeights)),
    ("/finish_weight_update", body_schema(FinishUpdate, required=False)),
):
    routes.add("POST", _path, forward, schema=_taken)
for _name, _kind in OPERATIONS.items():
    for _method in _kind.methods:
        _taken = query_schema(_kind) if _method == "GET" else body_schema(_kind, required=False)
        routes.add(_method, f"/{_name}", forward, schema=_taken)
