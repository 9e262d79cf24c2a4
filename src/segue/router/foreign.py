"""Workers that are no engines of Segue: any server with OpenAI's routes and ``GET /health``.

Such a server has no ``/watch``. Whole chats and completions go there as the client sent them, and the reply
comes back as it is. All other requests go there too if it is a router of Segue with an engine of Segue. Its
tokens are not known to the router, so it cannot go on with another worker's reply, and nobody can go on with
one of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from starlette.responses import Response

from segue.errors import NoWorkerError
from segue.laps.cost import Coefficients
from segue.logs import logger
from segue.messages.fleet import WorkerLoad, WorkerRecord, WorkerReport
from segue.messages.kv import KVIdentity
from segue.router.answers import code_of, passed_on, read_whole
from segue.router.attempts import kind_of
from segue.router.breaker import LegEnd
from segue.router.client_request import ClientRequest
from segue.router.deadline import within
from segue.router.entry import SentRequest, WorkerEntry
from segue.router.fleet import ALL_ROUTES, ROUTES_HEADER, SILENT_S
from segue.router.legs import LegError
from segue.router.membership import Membership
from segue.router.registry import Registry
from segue.router.reply import ClientReply
from segue.router.request_trace import LegTrace
from segue.router.upstream_connection import Headers, UpstreamConnection, UpstreamError

POLL_S = 1.0  # between two looks at its health
EVENTS = b"text/event-stream"
# What a step costs there is not known. With this guess, 20,000 tokens per second, workers get requests by the
# prompt tokens that they have in flight.
GUESS = Coefficients(floor=0.01, per_token=5e-5)


def foreign_record(entry: WorkerEntry) -> WorkerRecord:
    """Returns what stands for the record of such a worker; each one is taken for another process."""
    return WorkerRecord(
        worker_id=entry.id,
        url=entry.url,
        incarnation=secrets.token_hex(8),
        boot_id="",
        role="both",
        model="",
        tokenizer="",
        page_size=1,
        max_seq_len=1 << 30,  # it refuses itself what is too long
        kv_bytes_per_token=0,
    )


def foreign_report() -> WorkerReport:
    """Returns what stands for a report: it is idle, but for what this router has sent it."""
    load = WorkerLoad(queued_s=0.0, step_s=0.0, decode_rows=0, decode_kv=0, num_pages=1 << 20, taken_pages=0)
    return WorkerReport(
        epoch=0,
        state="active",
        heartbeat_age_s=0.0,
        load=load,
        coefficients=(*GUESS,),
        identity=KVIdentity("", 0),
    )


async def poll(membership: Membership, entry: WorkerEntry, headers: Headers) -> None:
    """Ask for a worker's health again and again, for as long as it is well.

    Raises:
        UpstreamError: the worker cannot be reached, or is not well.
        TimeoutError: it has not answered in time.
    """
    is_known = False
    while True:
        status, has_all = await within(SILENT_S, _health(entry, headers))
        if status != 200:
            text = f"it is no engine of Segue (/watch: 404), and answers /health with {status}; check its URL"
            raise UpstreamError("answered", text)
        if not is_known:
            membership.introduce(entry, foreign_record(entry), is_foreign=True)
            membership.report(entry, foreign_report(), time.monotonic())
        is_known = True
        membership.note_routes(entry, has_all=has_all)
        await asyncio.sleep(POLL_S)


async def _health(entry: WorkerEntry, headers: Headers) -> tuple[int, bool]:
    """Returns the status of its health, and whether it says that it has all routes of an engine."""
    connection = await entry.upstream.request(b"GET", b"/health", headers, b"")
    try:
        await read_whole(connection)
    finally:
        entry.upstream.done(connection)
    routes = dict(connection.headers).get(ROUTES_HEADER.encode())
    return connection.status, routes == ALL_ROUTES.encode()


class ForeignLeg:
    """A whole request at such a worker."""

    def __init__(
        self, registry: Registry, sent: SentRequest, reply: ClientReply, trace: LegTrace | None = None
    ) -> None:
        self._trace = trace
        assert sent.entry.view is not None
        self._registry = registry
        self._sent = sent
        self._worker = sent.entry.view
        self._reply = reply
        self._end: LegEnd = "client_left"  # unless something else happens
        self._status = 0
        self._code: str | None = None

    async def run(self, request: ClientRequest, headers: Headers) -> None:
        """Send the request, and pass the reply on; return when the client has all that there is.

        Raises:
            LegError: the worker failed, and the client has nothing yet.
        """
        connection: UpstreamConnection | None = None
        upstream = self._sent.entry.upstream
        if self._trace is not None:
            headers = [*headers, *self._trace.headers]
        try:
            connection = await upstream.request(b"POST", request.path.encode(), headers, request.body)
            self._status = connection.status
            await self._pass_on(connection, request.facts.is_stream)
        except UpstreamError as error:
            self._end = error.end
            logger.warning("worker %s failed at a request: %s", self._worker.id, error)
            if not self._reply.has_begun:
                raise LegError(
                    self._worker, kind_of(error.end, self._status, None, False), str(error)
                ) from None
            text = f"worker {self._worker.id} was lost ({error}) after the reply had begun"
            await self._reply.fail(NoWorkerError(f"{text}; send the request again"))
        finally:
            if connection is not None:
                upstream.done(connection)
            self._registry.end(self._sent, self._end, self._status, self._code)
            if self._trace is not None:
                is_well = self._end == "answered" and self._status < 500
                self._trace.end(self._end, self._status, self._code, is_well=is_well)

    async def _pass_on(self, connection: UpstreamConnection, is_stream: bool) -> None:
        kind = dict(connection.headers).get(b"content-type", b"")
        if self._status == 200 and is_stream and kind.startswith(EVENTS):
            while data := await connection.read():
                await self._reply.write(data)
            self._end = "answered"
            await self._reply.end(b"")
            return
        body = await read_whole(connection)
        self._end, self._code = "answered", code_of(body) if self._status >= 500 else None
        answer = Response(body, self._status)
        answer.raw_headers += passed_on(connection.headers)
        if self._status == 503:  # it has not begun with the request
            text = "it was answered 503"
            failure = kind_of("answered", self._status, self._code, False)
            raise LegError(self._worker, failure, text, answer=answer)
        await self._reply.answer(answer)
