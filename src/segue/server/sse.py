"""Server-sent events: a reply that sends a generator's bytes and ends early when the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from segue.errors import SegueError
from segue.logs import logger
from segue.server.responses import InternalError, encode

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0  # of silence, such as in a pause, after which a comment keeps the connection open
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(content: Any) -> bytes:
    """Returns one event with JSON data."""
    return b"data: " + encode(content) + b"\n\n"


@dataclass(eq=False)
class EventStream:
    """An ASGI application that sends the events that ``events`` yields.

    While the client is slow, ``send`` waits, and the output generated meanwhile is sent as one event. While
    there is nothing to send, comments are sent. An error becomes a last event of ``error_body``. ``close`` is
    called in every case: it aborts the requests that have not ended.
    """

    events: AsyncGenerator[bytes, None]
    error_body: Callable[[SegueError], dict[str, Any]]
    close: Callable[[], None]
    # Held while something is sent, so that no comment is sent after the end.
    _sending: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _sent_at: float = field(init=False, default_factory=time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply; return when it is complete or the client has disconnected."""
        comments = asyncio.create_task(self._fill_silence(send))
        try:
            with suppress(ClientDisconnect, OSError):
                await unless_gone(Request(scope, receive), self._send_all(send))
        finally:
            comments.cancel()
            self.close()  # first, because the next statement may raise
            await self.events.aclose()

    async def _fill_silence(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for ``KEEP_ALIVE_S``."""
        while True:
            await asyncio.sleep(self._sent_at + KEEP_ALIVE_S - time.monotonic())
            async with self._sending:  # while the client is slow, this waits until it has taken an event
                if time.monotonic() >= self._sent_at + KEEP_ALIVE_S:
                    await self._send_part(send, KEEP_ALIVE)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            await self._send_part(send, data, more=more)

    async def _send_part(self, send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sent_at = time.monotonic()

    async def _send_all(self, send: Send) -> None:
        async with self._sending:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            async for data in self.events:
                await self._send(send, data)
        except SegueError as error:
            await self._send(send, event(self.error_body(error)))
        except OSError:
            raise
        except Exception:
            logger.exception("a stream failed")
            await self._send(send, event(self.error_body(InternalError())))
        await self._send(send, b"", more=False)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of ``work``, which is cancelled if the client disconnects.

    The request's body must have been read before.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_cancel_when_gone(request.receive, worker))
    try:
        return await worker
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def _cancel_when_gone(receive: Receive, worker: asyncio.Future[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    worker.cancel()
