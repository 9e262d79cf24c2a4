"""A Ray Serve application in front of a fleet: each replica passes requests on to the fleet's router.

It needs no FastAPI: Serve hands it requests of Starlette. Replies are passed on as they come, so streams stay
streams; when a client leaves, the connection to the router ends, and with it the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from segue.errors import RequestTooLargeError, SegueError
from segue.integrations.ray.actors import RouterPlace
from segue.integrations.ray.fleet import NAMESPACE, router_name
from segue.server.raw_body import read_bytes
from segue.server.responses import error_response

# Of one connection, not of the message: each side has its own.
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length"),
}
CONNECT_S = 5.0
RAISE = "start the fleet with a larger max_body_mib in its RouterConfig and its EngineConfig"
AWAY = "the fleet's router cannot be reached; it is started again if it has died, so try again"


class RouterAwayError(SegueError, status=503, code="no_router"):
    """The router of the fleet cannot be reached."""


class FleetIngress:
    """One replica."""

    def __init__(self, fleet: str) -> None:
        """Take the name of a fleet that runs."""
        self._fleet = fleet
        self._session: Any = None
        self._router: RouterPlace | None = None  # None: to be asked for

    async def __call__(self, request: Request) -> Response:
        """Return the router's reply, whatever it is.

        Errors of this replica have the form of the route's API: 503 if the router cannot be reached, and 413
        for a body that the router would not take, of which no more than its limit is read.
        """
        import aiohttp

        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=limits, connector=connector, auto_decompress=False)
        try:
            router = await self._find_router()
            reply = await self._session.request(
                request.method,
                f"{router.url}{own_path(request)}",
                data=await read_bytes(request, router.max_body_mib, RAISE),
                headers=kept(request.headers.items()),
                allow_redirects=False,
            )
        except RequestTooLargeError as error:
            return error_response(error, own_path(request).partition("?")[0])
        except (aiohttp.ClientConnectionError, TimeoutError, LookupError) as error:
            self._router = None
            return error_response(RouterAwayError(f"{AWAY} ({error})"), own_path(request).partition("?")[0])
        headers = dict(kept(reply.headers.items()))
        return StreamingResponse(_pieces(reply), status_code=reply.status, headers=headers)

    async def _find_router(self) -> RouterPlace:
        """Return where the fleet's router is.

        Raises:
            LookupError: there is no such fleet.
        """
        if self._router is None:
            import ray

            try:
                router = ray.get_actor(router_name(self._fleet), namespace=NAMESPACE)
                self._router = await router.place.remote()
            except (ValueError, ray.exceptions.RayError) as error:
                raise LookupError(f"no router of a fleet {self._fleet!r}: {error}") from error
        return self._router


def ingress(fleet: str = "segue", *, replicas: int = 1, **options: Any) -> Any:
    """Return the application, for ``serve.run``.

    Args:
        fleet: the name of a fleet that runs, or will.
        replicas: the number of processes that share the clients.
        options: of `serve.deployment`, such as ``ray_actor_options`` or ``max_ongoing_requests``, which
            otherwise is 1,000 per replica: the engines limit their requests themselves.
    """
    from ray import serve

    chosen = {"num_replicas": replicas, "max_ongoing_requests": 1000} | options
    return serve.deployment(FleetIngress).options(**chosen).bind(fleet)


def build(arguments: dict[str, str]) -> Any:
    """Return the application for ``serve run segue.integrations.ray.ingress:build fleet=NAME replicas=N``."""
    return ingress(arguments.get("fleet", "segue"), replicas=int(arguments.get("replicas", "1")))


def own_path(request: Request) -> str:
    """Return the path and the query of a request, without the prefix of the application's route."""
    path = str(request.scope["path"]).removeprefix(str(request.scope.get("root_path", "")))
    query = request.url.query
    return f"{path}?{query}" if query else path


def kept(headers: Any) -> list[tuple[str, str]]:
    """Return the headers that belong to the message."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


async def _pieces(reply: Any) -> AsyncIterator[bytes]:
    """Return the body as it comes; the connection is closed if nobody reads on."""
    try:
        async for piece in reply.content.iter_any():
            yield piece
    finally:
        reply.close()
