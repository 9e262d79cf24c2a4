"""Replies: in JSON, large ones in pieces; as server-sent events; and errors in the form of each API.

:mod:`segue.errors` has each error's status, type and code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from segue.api.anthropic.errors import error_body
from segue.config import MIB
from segue.errors import SegueError
from segue.frontend.thread_pool import INLINE_ENTRIES, ThreadPool
from segue.logs import logger
from segue.messages.weight_operations import OPERATIONS
from segue.server.body_writer import BodyWriter, offered

DRAINED_MIB = 64  # of a too large body, read and dropped so that the client reads the answer
DRAIN_S = 3.0
ITEMS = 256  # items of a list that are encoded in one call
HEADERS = {  # of errors, by status
    401: {"www-authenticate": "Bearer"},
    413: {"connection": "close"},
    501: {"x-should-retry": "false"},  # clients of OpenAI and Anthropic retry from 500 on, unless told so
    503: {"retry-after": "1"},
}

# How paths begin whose errors have OpenAI's form.
OPENAI_PATHS = ("/v1/", "/inference/v1/", "/tokenize", "/detokenize")
MESSAGES = "/v1/messages"  # errors of this route, and of those below it, have Anthropic's form
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0  # of silence, such as in a pause, after which a comment keeps the connection open
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
T = TypeVar("T")
encode = msgspec.json.Encoder().encode


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a reply with ``content`` as JSON; msgspec must be able to encode it."""
    return Response(encode(content), status, headers, "application/json")


async def reply_response(content: Any, num_entries: int, thread_pool: ThreadPool) -> Response:
    """Returns a JSON reply; with more than ``INLINE_ENTRIES`` entries, a thread encodes it in pieces.

    ``num_entries`` (choices, tokens and the like) says how long the encoding would hold up the event loop.
    """
    return Response(await reply_bytes(content, num_entries, thread_pool), media_type="application/json")


async def reply_bytes(content: Any, num_entries: int, thread_pool: ThreadPool) -> bytes:
    """Returns the JSON of a reply, as :func:`reply_response` sends it."""
    if num_entries <= INLINE_ENTRIES:
        return encode(content)
    return await thread_pool.run(lambda: b"".join(json_pieces(content)))


def json_pieces(content: Any) -> Iterator[bytes]:
    """Yields JSON in pieces; each takes one call into C, which encodes a bounded number of values."""
    if isinstance(content, dict) and content:
        for index, (name, value) in enumerate(content.items()):
            yield b"%b%b:" % (b"," if index else b"{", encode(name))
            yield from json_pieces(value)
        yield b"}"
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        for index, value in enumerate(content):
            yield b"," if index else b"["
            yield from json_pieces(value)
        yield b"]"
    elif isinstance(content, list) and len(content) > ITEMS:
        for start in range(0, len(content), ITEMS):
            yield b"," if start else b"["
            yield encode(content[start : start + ITEMS])[1:-1]
        yield b"]"
    else:
        yield encode(content)


# --- server-sent events ---


def event(content: Any) -> bytes:
    """Returns one event with JSON data."""
    return b"data: " + encode(content) + b"\n\n"


@dataclass(eq=False)
class EventStream:
    """An ASGI application that sends the events that ``events`` yields.

    While the client is slow, ``send`` waits, and the output generated meanwhile is sent as one event. While
    there is nothing to send, comments are sent. An error becomes a last event, which ``failure`` makes.
    ``close`` is called in every case: it aborts the requests that have not ended.
    """

    events: AsyncGenerator[bytes, None]
    failure: Callable[[SegueError], bytes]
    close: Callable[[], None]
    headers: Sequence[tuple[bytes, bytes]] = EVENT_HEADERS
    comment: bytes = KEEP_ALIVE
    # Held while something is sent, so that no comment is sent after the end.
    _sending: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _sent_at: float = field(init=False, default_factory=time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply; return when it is complete or the client has disconnected."""
        comments = asyncio.create_task(self._fill_silence(send))
        try:
            with suppress(ClientDisconnect, OSError):
                await unless_gone(Request(scope, receive), self._send_all(send, offered(scope)))
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
                    await self._send_part(send, self.comment)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Send a part once nothing else is being sent; without ``more`` it is the last one."""
        async with self._sending:
            await self._send_part(send, data, more=more)

    async def _send_part(self, send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sent_at = time.monotonic()

    async def _send_all(self, send: Send, writer: BodyWriter | None) -> None:
        """Send the head of the reply, every event and the end; an error becomes the last event.

        ``writer`` takes an event at once, unless the client is slow. A comment that is being sent waits for
        that client, too, so nothing comes between its bytes.
        An OSError is raised, because it means that the client has gone and that nobody would read an event.
        """
        async with self._sending:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        try:
            async for data in self.events:
                if writer is not None and data and writer.write(data):
                    self._sent_at = time.monotonic()
                else:
                    await self._send(send, data)
        except SegueError as error:
            await self._send(send, self.failure(error))
        except OSError:
            raise
        except Exception:
            logger.exception("a stream failed")
            await self._send(send, self.failure(InternalError()))
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
    """Cancel the work once ``receive`` tells that the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    worker.cancel()


# --- errors ---


def openai_body(error: SegueError) -> dict[str, Any]:
    """Returns the body of an error on OpenAI routes."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def native_body(error: SegueError) -> dict[str, Any]:
    """Returns the body of an error on control and native routes."""
    return {
        "object": "error",
        "message": error.message,
        "type": error.type,
        "code": error.status,
        "error_code": error.code,  # the ``code`` of the same error on OpenAI routes
    }


def body_of(error: SegueError, path: str) -> dict[str, Any]:
    """Returns the body of an error on a client's route: in OpenAI's form on its routes and on vLLM's."""
    if has_messages_form(path):
        return error_body(error)
    return openai_body(error) if path.startswith(OPENAI_PATHS) else native_body(error)


def has_messages_form(path: str) -> bool:
    """Whether the errors of a route have Anthropic's form."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_event(body: bytes, path: str) -> bytes:
    """Returns the last event of a stream that failed on a client's route, from the error's body in JSON."""
    name = b"event: error\n" if has_messages_form(path) else b""
    return b"%bdata: %b\n\n" % (name, body)


def error_response(error: SegueError, path: str, body: dict[str, Any] | None = None) -> Response:
    """Returns the answer to a request that failed before its reply began.

    ``path`` decides its form, OpenAI's or the native one, unless the caller gives a ``body``. Where the body
    was too large (413), the client may still be sending it, and the rest is read.
    """
    if body is None:
        body = body_of(error, path)
    kind = _LingeringResponse if error.status == 413 else Response
    return kind(encode(body), error.status, HEADERS.get(error.status), "application/json")


def native_error_response(error: SegueError, path: str) -> Response:
    """Returns the answer to an error on a control route whose path looks like one of OpenAI's."""
    return error_response(error, path, native_body(error))


def weight_error_response(error: SegueError, path: str) -> Response:
    """Returns the answer to an error on a route of the weights, in the form of the route's replies.

    Those have ``success`` and ``message`` and, where the operation's replies have one, ``status``.
    """
    kind = OPERATIONS.get(path[1:])  # by the path without its slash
    status = {"status": "error"} if kind and "status" in kind.reply else {}
    return error_response(error, path, {"success": False, "message": error.message} | status)


class RouteError(SegueError, type="invalid_request_error"):
    """The route does not exist, or not with this method."""

    def __init__(self, status: int, request: Request) -> None:
        """Make the error of ``status`` 404 (no such route) or 405 (another method is needed)."""
        reason = "no such route" if status == 404 else "this route does not take this method"
        super().__init__(f"{request.method} {request.url.path}: {reason}; /openapi.json lists the routes")
        self.status = status
        self.code = "not_found" if status == 404 else "method_not_allowed"


class InternalError(SegueError, code="internal_error"):
    """A bug in the server; its traceback goes to the log, not to the client."""

    def __init__(self) -> None:
        super().__init__("internal error; the server's log has the details")


class _LingeringResponse(Response):
    """Answers at once, then reads and drops the rest of the body, within bounds.

    A socket that is closed with unread data is reset, and the client might never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, drop up to ``DRAINED_MIB`` of the body for at most ``DRAIN_S``, end the reply.

        The reply must not be complete earlier: uvicorn would then close the connection.
        """
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        size, has_more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while has_more and size < DRAINED_MIB * MIB:
                    message = await receive()
                    size += len(message.get("body", b""))
                    has_more = message.get("more_body", False)  # absent when the client disconnects
        await send({"type": "http.response.body", "body": b"", "more_body": False})
