"""Requests that a serving process leaves to the coordinator: all but those that a worker is to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from segue.errors import DrainingError, SegueError
from segue.router.answers import read_whole
from segue.router.client_request import ID_PREFIXES
from segue.router.router import Router
from segue.router.upstream import Upstream
from segue.router.upstream_connection import UpstreamConnection, UpstreamError
from segue.server.access import Access, Gate
from segue.server.raw_body import read_bytes
from segue.server.request_ids import HEADER, id_of
from segue.server.responses import EventStream, error_response, unless_gone
from segue.server.webpage_feed import EVENTS, failure

OWN_PATHS = frozenset((*ID_PREFIXES, "/v1/models"))  # that a serving process answers itself
FORWARDED = frozenset(("GET", "POST", "DELETE"))  # other methods no route has
# Headers of a connection, and those that the server writes anew.
_OF_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"host", b"date"),
        HEADER,
    )
)


class Forwarding:
    """An ASGI application that answers as the coordinator does, or as ``app`` what is the process's own."""

    def __init__(self, app: Starlette, address: bytes) -> None:
        """Take the application of this process, and the address of the coordinator's Unix socket."""
        self._app: ASGIApp = app
        self._gate: Gate = app.state.gate
        self._router: Router = app.state.router
        self._coordinator = Upstream("http://coordinator", address=address)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path in OWN_PATHS or scope["method"] not in FORWARDED:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        with suppress(ClientDisconnect):
            try:
                answer: ASGIApp = await self._answer(request)
            except SegueError as error:
                answer = error_response(error, path)
            await answer(scope, receive, send)

    def close(self) -> None:
        """Close the connections to the coordinator."""
        self._coordinator.abort_all("client_left", "this process ends")

    async def _answer(self, request: Request) -> ASGIApp:
        """Returns the coordinator's answer. It makes all checks; one for a key is made before a body is read.

        Raises:
            AuthenticationError: there is a body, and no key with which any route would take it.
            RequestTooLargeError: the body is larger than ``--max-body-mib``.
            DrainingError: the coordinator has ended, and this process soon will.
        """
        scope = request.scope
        if scope["method"] != "GET":
            self._gate.check_key(dict(scope["headers"]), Access.USER)
        body = await read_bytes(request, self._router.config.max_body_mib)
        return await unless_gone(request, self._ask(scope, body))

    async def _ask(self, scope: Scope, body: bytes) -> ASGIApp:
        query, headers = scope["query_string"], scope["headers"]
        request_id = (HEADER, id_of(scope).encode())
        try:
            connection = await self._coordinator.request(
                scope["method"].encode(),
                scope["raw_path"] + (b"?" + query if query else b""),
                [request_id, *(header for header in headers if header[0] not in _OF_CONNECTION)],
                body,
                dict(headers).get(b"host"),
            )
            if scope["path"] == EVENTS and connection.status == 200:
                return EventStream(_parts(connection), failure, partial(self._coordinator.done, connection))
            try:
                answer = Response(await read_whole(connection), connection.status)
            finally:
                self._coordinator.done(connection)
        except UpstreamError:
            raise DrainingError("the router is shutting down; send the request to another one") from None
        answer.raw_headers += [each for each in connection.headers if each[0] not in _OF_CONNECTION]
        return answer


async def _parts(connection: UpstreamConnection) -> AsyncGenerator[bytes, None]:
    """Yields the body of a reply as it arrives, to its end or to that of the coordinator."""
    with suppress(UpstreamError):
        while data := await connection.read():
            yield data
