"""One HTTP connection to a worker, or to another process of the router: a request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import httptools

from segue.router.breaker import LegEnd

HIGH_BYTES = 1 << 16  # of a body that nobody has read; above it the connection is not read

Headers = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """A request to a worker has failed; ``end`` says how."""

    def __init__(self, end: LegEnd, text: str) -> None:
        super().__init__(text)
        self.end = end


class ConnectionOwner(Protocol):
    """What has a connection, and wants to know its end."""

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that has ended."""


class UpstreamConnection(asyncio.Protocol):
    """One connection, which carries one request at a time; asyncio and httptools call its methods."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None  # of `read_by`
        self._parts: list[bytes] = []
        self._size = 0
        self._error: UpstreamError | None = None
        self._has_received = False
        self._keeps_alive = False
        self.status = 0  # of the reply; 0: its head has not arrived
        self.headers: Headers = []
        self.is_complete = True

    # --- for the one who sends a request ---

    def send(self, request: bytes) -> None:
        """Send a request, head and body.

        Raises:
            UpstreamError: the connection has ended since it was opened, or since its last reply.
        """
        self._has_received = False
        if self._error is not None:  # uvloop raises a RuntimeError if more is written
            raise self._error
        assert self._transport is not None and self.is_complete
        self._parser = httptools.HttpResponseParser(self)
        self._parts, self._size, self.headers = [], 0, []
        self.status, self.is_complete = 0, False
        self._transport.write(request)

    async def head(self) -> int:
        """Wait for the reply's head; returns its status. Raises UpstreamError if it does not come."""
        while not self.status:
            await self._more()
        return self.status

    async def read(self) -> bytes:
        """Returns what has arrived of the body, at least a byte; ``b""`` at its end.

        Raises:
            UpstreamError: the connection ended before the body.
        """
        while not self._parts:
            if self.is_complete:
                return b""
            await self._more()
        return self._joined()

    async def read_by(self, take: Callable[[bytes], bool]) -> None:
        """Give all that arrives of the body to ``take``; return when that returns False, or at the end.

        ``take`` is called as soon as bytes arrive, without a turn of the event loop in between. Behind it,
        they are at most a turn old.

        Raises:
            UpstreamError: the connection ended before the body.
        """
        while self._parts or not self.is_complete:
            if self._parts:
                if not take(self._joined()):
                    return
                continue
            self._take = take
            try:
                await self._more()
            finally:
                wants_more, self._take = self._take is not None, None
            if not wants_more:
                return

    def _joined(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if self._size > HIGH_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._size = 0
        return data

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent."""
        return self._error is None and self.is_complete and self._keeps_alive

    @property
    def has_ended(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._error is not None

    @property
    def has_received(self) -> bool:
        """Whether a byte of the reply has arrived."""
        return self._has_received

    def abort(self, end: LegEnd, text: str) -> None:
        """Close the connection at once; whoever reads gets an UpstreamError."""
        self._fail(UpstreamError(end, text))
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    # --- asyncio ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the reply."""
        if self._parser is None or self.is_complete:
            self.abort("cut", "the worker sent bytes that belong to no request")
            return
        self._has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort("cut", f"the worker's reply is not HTTP ({error})")
            return
        if self._take is not None and not self.is_complete:
            return
        if self.status and (self._parts or self.is_complete or self._waiter is not None):
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._fail(UpstreamError("cut", "the worker closed the connection"))
        self._owner.forget(self)

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the status."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; a reader that is slow stops the connection from being read."""
        if self._take is not None:
            if not self._take(body):
                self._take = None
            return
        self._parts.append(body)
        before, self._size = self._size, self._size + len(body)
        if before <= HIGH_BYTES < self._size and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The reply is complete; whether the connection stays open is known now, and not any more later."""
        assert self._parser is not None
        self.is_complete, self._keeps_alive = True, self._parser.should_keep_alive()
