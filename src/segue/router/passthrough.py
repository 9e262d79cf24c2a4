"""Requests that generate nothing: one worker answers, and its whole reply goes to the client as it is.

Such a request changes nothing, so it may be sent to another worker if one does not answer.
"""

from __future__ import annotations

import time
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from segue.logs import logger
from segue.router.answers import code_of, passed_on, read_whole
from segue.router.attempts import GONE, RETRIED, process_of
from segue.router.breaker import LegEnd
from segue.router.choice import Refuse
from segue.router.entry import SentRequest
from segue.router.fleet import WorkerView
from segue.router.registry import Registry
from segue.router.upstream_connection import Headers, UpstreamError
from segue.server.responses import error_response, unless_gone

POLL_S = 0.05  # at most, between two looks for an engine that takes another one's place


class Passthrough:
    """An ASGI application that answers a request by the reply of the first worker that has an answer."""

    def __init__(
        self, registry: Registry, headers: Headers, path: str, body: bytes | None, resume_timeout_s: float
    ) -> None:
        """Take a request.

        Args:
            registry: of the workers.
            headers: those that workers get, with their key.
            path: of the request.
            body: of a POST; None: the request is a GET.
            resume_timeout_s: seconds to wait for an engine that is about to take another one's place.
        """
        self._registry = registry
        self._headers = headers
        self._path = path
        self._method, self._body = (b"GET", b"") if body is None else (b"POST", body)
        self._resume_timeout_s = resume_timeout_s
        self._tried: set[tuple[str, str]] = set()  # processes that were asked
        self._gone: set[tuple[str, str]] = set()  # those of them that cannot serve any more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; return when the reply is complete or the client has left."""
        with suppress(ClientDisconnect, OSError):
            answer = await unless_gone(Request(scope, receive), self._answer())
            await answer(scope, receive, send)

    async def _answer(self) -> Response:
        """Returns the answer of a worker; the last refusal if all refuse and none is about to be replaced."""
        registry, answer = self._registry, None
        deadline = time.monotonic() + self._resume_timeout_s
        while True:
            now = time.monotonic()
            tried = frozenset(view.id for view in registry.views() if process_of(view) in self._tried)
            choice = registry.choose_any(self._path, tried, now)
            if not isinstance(choice, Refuse):
                self._tried.add(process_of(choice.worker))
                found = await self._ask(registry.begin(choice, now))
                if found is None or code_of(bytes(found.body)) in GONE:
                    self._gone.add(process_of(choice.worker))
                answer = found or answer
                if answer is not None and answer.status_code != RETRIED:
                    return answer
            elif registry.is_closed or now >= deadline or not self._is_awaited(now):
                return answer or error_response(choice.error(), self._path)
            else:
                await registry.wait_for_change(min(POLL_S, deadline - now))

    def _is_awaited(self, now: float) -> bool:
        """Whether an engine is about to take another one's place."""
        return any(s < self._resume_timeout_s for s in self._registry.vacancies(self._is_gone, now).values())

    def _is_gone(self, view: WorkerView) -> bool:
        return process_of(view) in self._gone

    async def _ask(self, sent: SentRequest) -> Response | None:
        """Returns a worker's reply; None: it was lost."""
        end: LegEnd = "client_left"  # unless something else happens
        status, code, connection = 0, None, None
        upstream = sent.entry.upstream
        try:
            connection = await upstream.request(self._method, self._path.encode(), self._headers, self._body)
            status = connection.status
            body = await read_whole(connection)
            end, code = "answered", code_of(body) if status >= 500 else None
            response = Response(body, status)
            response.raw_headers += passed_on(connection.headers)
            return response
        except UpstreamError as error:
            end = error.end
            logger.warning("worker %s failed at %s: %s", sent.entry.id, self._path, error)
            return None
        finally:
            if connection is not None:
                upstream.done(connection)
            self._registry.end(sent, end, status, code)
