"""The client's side of a relayed request: its reply, whose head is sent with the first byte of the body."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from segue.errors import SegueError
from segue.server.body_writer import offered
from segue.server.responses import (
    EVENT_HEADERS,
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    body_of,
    encode,
    error_event,
    error_response,
)


class ClientReply:
    """The reply to one client. Until its first byte has been sent, another answer is possible."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, path: str, *, is_stream: bool) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._path = path
        self._is_stream = is_stream
        self._writer = offered(scope)
        self._sent_at = time.monotonic()
        self.has_begun = False  # whether the client has a byte of it

    def write(self, payload: bytes) -> Awaitable[None]:
        """Send a part of a stream; wait while the client is slow. Only for streams."""
        assert self._is_stream
        self._sent_at = time.monotonic()
        if not self.has_begun:
            return self._begin(payload)
        return self._send({"type": "http.response.body", "body": payload, "more_body": True})

    def write_now(self, payload: bytes) -> bool:
        """Send a part of a stream that has begun, if this needs no waiting; returns whether it was sent."""
        if self._writer is None or not self._writer.write(payload):
            return False
        self._sent_at = time.monotonic()
        return True

    async def end(self, payload: bytes) -> None:
        """Send the last bytes of a stream, or a whole reply."""
        if self._is_stream:
            if not self.has_begun:
                await self._begin(b"")
            await self._send({"type": "http.response.body", "body": payload, "more_body": False})
        else:
            await self.answer(Response(payload, media_type="application/json"))

    async def keep_alive(self) -> None:
        """Send a comment if a stream has been silent for long: proxies close silent connections."""
        if self._is_stream and time.monotonic() >= self._sent_at + KEEP_ALIVE_S:
            await self.write(KEEP_ALIVE)

    async def answer(self, response: Response) -> None:
        """Send an answer instead of the reply; if a stream has begun, as its last event."""
        if self.has_begun:
            await self.end(error_event(bytes(response.body), self._path))
            return
        self.has_begun = True
        await response(self._scope, self._receive, self._send)

    async def fail(self, error: SegueError) -> None:
        """End with an error: as an answer, or as the last event of a stream that has begun."""
        if not self.has_begun:
            await self.answer(error_response(error, self._path))
            return
        await self.end(error_event(encode(body_of(error, self._path)), self._path))

    async def end_failed(self, status: int, payload: bytes) -> None:
        """End with a worker's own error: an event of a stream, or a whole body with its status."""
        if self._is_stream:
            await self.end(payload)
        else:
            await self.answer(Response(payload, status, media_type="application/json"))

    async def _begin(self, payload: bytes) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})
        await self._send({"type": "http.response.body", "body": payload, "more_body": True})
