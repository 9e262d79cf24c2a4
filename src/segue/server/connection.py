"""One client's connection: uvicorn's HTTP protocol with deadlines, size limits and HTTP/1.0 replies."""

from __future__ import annotations

import asyncio
import math
import re
from enum import Enum
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from segue.errors import InvalidRequestError, OverloadedError, RequestTimeoutError, SegueError
from segue.server.body_writer import BodyWriter, extensions
from segue.server.connections import Backpressure, Connections, Room
from segue.server.request_ids import HEADER, id_extension, taken_id
from segue.server.responses import error_response
from segue.server.unchunked import unchunked

_UPGRADE = re.compile(rb"^upgrade(?=:)", re.IGNORECASE | re.MULTILINE)
# Paths that are answered even when every ordinary connection is taken.
HEALTH_TARGETS = frozenset((b"/health", b"/health_generate", b"/ready", b"/ping", b"/metrics"))
NO_ROOM = "the server has no room for more connections; retry later"
EVICT_S = 0.05  # for the last bytes to be written where a client that speaks TLS gives way to another one
UNREADABLE = (
    "the server cannot read this as an HTTP/1.1 request; check the client, and any proxy between it and the "
    "server"
)
UPGRADE = (
    "the request asks for another protocol, by CONNECT or by an Upgrade header that was split or pipelined; "
    "send plain HTTP/1.1, without CONNECT and without that header"
)


class Awaited(Enum):
    """The part of a request that the client has to send next."""

    IDLE = "the first byte of a head"
    HEAD = "the rest of a head"
    BODY = "the rest of a body"


class Connection(HttpToolsProtocol):
    """Reads requests and sends replies; :class:`Connections` checks its deadlines regularly.

    In uvicorn's words, a cycle is a request and its reply, ``cycle`` is the one received last, and
    ``pipeline`` has those that were received before the reply of an earlier one was complete, and that wait
    for it. ``flow`` pauses reading. What the client has to send next is kept as :class:`Awaited`.

    A client that closes only its sending side counts as disconnected, as one that closes the connection does.

    Java's HTTP client offers HTTP/2 in an ``Upgrade`` header of every first request. A server may ignore
    that offer, but httptools would read the body as another protocol and lose it. So the header is renamed.
    """

    flow: Backpressure

    def __init__(self, *, connections: Connections, root_path: bytes = b"", **of_uvicorn: Any) -> None:
        """Make the protocol of a client that is not connected yet; ``of_uvicorn`` goes to uvicorn's own.

        ``root_path`` is removed from paths that begin with it.
        """
        super().__init__(**of_uvicorn)
        self._connections = connections
        self._prefix = root_path
        self._limits = connections.limits
        self._application: Any = self.app
        self._answering: RequestResponseCycle | None = None  # the application works on this one
        self._room = Room.ORDINARY
        self._awaited = Awaited.IDLE
        self._since = 0.0  # when waiting for `_awaited` began, by `Backpressure.unpaused`
        self._received_at = 0.0  # when the last bytes were received
        self._num_received = 0  # bytes since the head began
        self._num_kept = 0  # bytes of requests that are incomplete, or not yet read by the application
        self._num_unparsed = 0  # bytes since the last complete head, body part or request
        self._unsent: tuple[float, int] | None = None  # start of a measurement, unsent bytes at that time

    # --- transport ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer 503 and close it."""
        super().connection_made(transport)
        self.flow = Backpressure(transport, self._connections)
        self._room = self._connections.opened(self)
        self._since = self._received_at = self._connections.now
        if self._room is Room.NONE:
            self.refuse(OverloadedError(NO_ROOM))
        else:
            self._connections.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave :class:`Connections`, and mark the request that is being answered as disconnected."""
        self._release_bytes()
        self._connections.closed(self)
        self._mark_disconnected()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes, after renaming an ``Upgrade`` header, and count those that stay in memory."""
        if self._awaited is not Awaited.BODY:
            head, blank, rest = data.partition(b"\r\n\r\n")
            if b"upgrade:" in head.lower():  # takes 20 µs for 64 KiB, the pattern alone 100 µs
                data = _UPGRADE.sub(b"X-Upgrade", head) + blank + rest
        size = len(data)
        self._num_unparsed += size
        self._num_received += size
        self._received_at = self._connections.now
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_unparsed > self._limits.head_bytes:
            text = f"the request line and headers exceed {self._limits.head_bytes} bytes; shorten them"
            self.refuse(InvalidRequestError(text))
        elif self._keeps_bytes:
            self._num_kept += size
            self._connections.received(self, size)

    def resume_writing(self) -> None:
        """The client has read most of the bytes that were written."""
        self._unsent = None
        super().resume_writing()

    # --- parser ---

    def on_message_begin(self) -> None:
        """A head begins."""
        if len(self.pipeline) >= (most := self._limits.pipelined_requests):
            self._stop_parsing(f"more than {most} requests wait on this connection; await replies")
        super().on_message_begin()
        self._num_received = 0
        self._enter(Awaited.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. A trailer is dropped, as uvicorn would add it to the checked headers."""
        if self._awaited is Awaited.BODY:
            return
        if len(self.headers) >= self._limits.head_fields:
            self._stop_parsing(f"the request has more than {self._limits.head_fields} headers; send fewer")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Call the application, now that the head is complete."""
        if self.parser.should_upgrade():  # else the body would be parsed as the next request
            self._stop_parsing(UPGRADE)
        self._num_unparsed = 0
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # an HTTP/1.0 client does not expect an interim status
        if self._prefix:
            self._remove_prefix()
        self.app = self._choose_application()  # uvicorn's method, called next, starts it
        super().on_headers_complete()
        request_id = taken_id(self.headers)
        self.cycle.default_headers = [*self.cycle.default_headers, (HEADER, request_id.encode())]
        self.scope["extensions"] = extensions(BodyWriter(self.cycle)) | id_extension(request_id)
        if not self.pipeline:
            self._answering = self.cycle
        self._enter(Awaited.BODY)

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next one may begin."""
        self._num_unparsed = 0
        super().on_message_complete()
        self._connections.body_ended(self)
        self._enter(Awaited.IDLE)

    def on_response_complete(self) -> None:
        """Go on to the next pipelined request; the rest of an unread body is dropped."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        self._release_bytes()
        self._enter(self._awaited)  # the same part, but only from now on the client is waited for

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to bytes that the parser cannot read, in place of uvicorn's own text."""
        if not self.transport.is_closing():
            self.refuse(InvalidRequestError(UNREADABLE))

    def _enter(self, awaited: Awaited) -> None:
        """Note what the client has to send next, and begin anew to measure how long it takes.

        Also tells :class:`Connections`: a connection is in ``bodies`` while a body is incomplete, and in
        ``waiting`` while the client owes a head and the server owes no answer.
        """
        connections = self._connections
        self._awaited = awaited
        self._since = self.flow.unpaused(connections.now)
        connections.waiting.pop(self, None)
        if awaited is Awaited.BODY:
            connections.bodies[self] = None
        elif not self._owes_answer and not self.transport.is_closing():
            connections.waiting[self] = None

    @property
    def _owes_answer(self) -> bool:
        """Whether the reply to the request that was received last is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _keeps_bytes(self) -> bool:
        """Whether received bytes stay in memory; the rest of a body does not once its answer has begun."""
        if self._awaited is Awaited.BODY:
            return self._owes_answer and not self.cycle.response_started
        return self._owes_answer or self._awaited is Awaited.HEAD

    def _remove_prefix(self) -> None:
        """Remove the root path from the request's URL, if it is there: routes are matched without it."""
        rest = self.url.removeprefix(self._prefix)
        if len(rest) < len(self.url) and rest[:1] in (b"", b"/", b"?"):
            self.url = rest if rest[:1] == b"/" else b"/" + rest

    def _choose_application(self) -> Any:
        """Returns the ASGI application that answers the present request.

        A connection beyond the limit (`Room.SPARE`) reaches only the health routes. A client of HTTP/1.0
        cannot read chunked replies: it gets them without chunks.
        """
        if self._room is Room.SPARE and self.url.partition(b"?")[0] not in HEALTH_TARGETS:
            return _no_room
        if self.parser.get_http_version() == "1.0":
            return unchunked(self._application, self.parser.should_keep_alive())
        return self._application

    def _release_bytes(self) -> None:
        count, self._num_kept = self._num_kept, 0
        self._connections.released(count)

    # --- refusals ---

    def refuse(self, error: SegueError) -> None:
        """Answer with the error unless an answer has begun, and close the connection."""
        if self._may_answer:
            # Where the path is not known, the error gets the form of OpenAI's routes.
            response = error_response(error, self.scope["path"] if self._owes_answer else "/v1/")
            shared = self.cycle.default_headers if self._owes_answer else self.server_state.default_headers
            headers = [*shared, *response.raw_headers, (b"connection", b"close")]
            head = STATUS_LINE[response.status_code] + b"".join(b"%s: %s\r\n" % each for each in headers)
            self.transport.write(head + b"\r\n" + bytes(response.body))
        self._mark_disconnected()
        self._release_bytes()
        self.transport.close()

    def _mark_disconnected(self) -> None:
        """Mark the request being answered as disconnected; with pipelining it may not be the latest."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    @property
    def _may_answer(self) -> bool:
        """Whether the client would relate an error written now to the request that the error is about."""
        if self._awaited is Awaited.BODY:
            return self._owes_answer and not (self.cycle.response_started or self.pipeline)
        return not self._owes_answer

    def evict(self) -> None:
        """Close the connection at once; a client that has begun to send a request is answered 503 first."""
        if self._awaited is not Awaited.IDLE or self._owes_answer:
            self.refuse(OverloadedError(NO_ROOM))
        if self.transport.get_write_buffer_size():  # a plain close would wait until the client reads it
            self.transport.abort()
        else:
            self.transport.close()
            if self.scheme == "https":  # which waits for the client to agree, while its descriptor is needed
                self.loop.call_later(EVICT_S, self.transport.abort)

    def _stop_parsing(self, message: str) -> None:
        """Answer 400, and raise ValueError, because only an error keeps httptools from parsing on."""
        self.refuse(InvalidRequestError(message))
        raise ValueError(message)

    def abort_closing(self) -> None:
        """Close the connection at once if only the client's agreement to its end is awaited."""
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.transport.abort()

    # --- deadlines ---

    def check(self, now: float) -> None:
        """Answer 408, close or abort the connection if its client has missed a deadline."""
        if unsent := self.transport.get_write_buffer_size():
            self._check_unsent(now, unsent)
        else:
            self._unsent = None
        late = None if self.transport.is_closing() else self._late_with(now)
        if late:
            self.refuse(RequestTimeoutError(late))
        elif late is not None:
            self.transport.close()

    def _late_with(self, now: float) -> str | None:
        """Returns what the client has not sent in time, as the text of a 408; None: it is in time.

        An empty text means that the connection is to be closed without a 408, which the client would take
        for the answer to another request.
        """
        limits, waited = self._limits, self.waited(now)
        if self._awaited is Awaited.BODY:
            if not self._owes_answer:
                return "" if waited > limits.drain_s else None
            if self.silence(now) > limits.body_silence_s:
                return f"no byte of the body arrived for {limits.body_silence_s:g} s; send it without pauses"
            if self._num_received < limits.body_rate * (waited - limits.body_grace_s):
                return f"the body arrived at less than {limits.body_rate:g} bytes per second; send it faster"
        elif not self._owes_answer:
            if self._awaited is Awaited.HEAD and waited > limits.head_s:
                return f"the request's line and headers took more than {limits.head_s:g} s; send them at once"
            if self._awaited is Awaited.IDLE and waited > (limits.idle_s if self.cycle else limits.head_s):
                return ""  # a client would take a 408 for the answer to its next request
        return None

    def _check_unsent(self, now: float, unsent: int) -> None:
        """Abort if the client reads its reply more slowly than ``reply_rate``.

        ``unsent`` is the number of bytes that wait to be sent. A measurement compares two such numbers, and
        lasts for one of the two times of silence. While a stream grows, the number says nothing of the client
        unless writing is paused: so only then it is measured.
        """
        limits = self._limits
        is_finished = not self._owes_answer or self.transport.is_closing()
        if self._unsent is None or not (is_finished or self.flow.write_paused):
            self._unsent = now, unsent
            return
        since, before = self._unsent
        patience = limits.reply_silence_s if is_finished else limits.stream_silence_s
        if now - since > patience:
            if before - unsent < limits.reply_rate * patience:
                self.transport.abort()
            self._unsent = now, unsent

    def waited(self, now: float) -> float:
        """Returns the seconds spent waiting for the next part of a request, without pauses of reading."""
        return self.flow.unpaused(now) - self._since

    def silence(self, now: float) -> float:
        """Returns for how long the client has sent no byte of a body, or has left a finished reply unread.

        In seconds; 0 if neither is expected of it now. Long silence has it closed for a new connection.
        """
        if self._awaited is Awaited.BODY and not self.flow.read_paused:
            return now - max(self._received_at, self.flow.resumed_at)
        if self._unsent is not None and not self._owes_answer:
            return now - self._unsent[0]
        return 0.0

    # --- bytes ---

    @property
    def is_served(self) -> bool:
        """Whether the body being received belongs to the request that is being answered."""
        return self._answering is self.cycle

    def rate(self, now: float) -> float:
        """Returns the bytes per second of the request being received, by which slow ones are refused first.

        Infinite where nothing is to be refused: no request is being received, its first bytes have just come,
        or an earlier request is still being answered.
        """
        waited = self.waited(now)
        if self._awaited is Awaited.IDLE or waited <= 0.0 or not self._num_kept or not self.is_served:
            return math.inf
        return self._num_received / waited

    def release_read_body(self) -> None:
        """Stop counting the bytes of a complete body that the application has read.

        :class:`Connections` calls this when bytes are scarce, because uvicorn does not tell when a body is
        read.
        """
        if self._num_kept and self._awaited is Awaited.IDLE and not (self.cycle.body or self.pipeline):
            self._release_bytes()


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 503 in place of the application."""
    response = error_response(OverloadedError(NO_ROOM), scope["path"])
    response.headers["connection"] = "close"
    await response(scope, receive, send)
