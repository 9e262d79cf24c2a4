"""Replies in JSON: small ones, large ones in pieces, and errors in the form of each API.

:mod:`segue.errors` has each error's status, type and code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from segue.config import MIB
from segue.errors import SegueError
from segue.frontend.thread_pool import INLINE_ENTRIES, ThreadPool

DRAINED_MIB = 64  # of a too large body, read and dropped so that the client reads the answer
DRAIN_S = 3.0
ITEMS = 256  # items of a list that are encoded in one call
HEADERS = {  # of errors, by status
    401: {"www-authenticate": "Bearer"},
    413: {"connection": "close"},
    503: {"retry-after": "1"},
}

encode = msgspec.json.Encoder().encode


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a reply with ``content`` as JSON; msgspec must be able to encode it."""
    return Response(encode(content), status, headers, "application/json")


async def reply_response(content: Any, num_entries: int, thread_pool: ThreadPool) -> Response:
    """Returns a JSON reply. With more than ``INLINE_ENTRIES`` entries, a thread encodes it in pieces."""
    if num_entries <= INLINE_ENTRIES:
        return json_response(content)
    data = await thread_pool.run(lambda: b"".join(json_pieces(content)))
    return Response(data, media_type="application/json")


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


# --- errors ---


def openai_body(error: SegueError) -> dict[str, Any]:
    """Returns the body of an error on OpenAI routes."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def native_body(error: SegueError) -> dict[str, Any]:
    """Returns the body of an error on control and native routes."""
    return {"object": "error", "message": error.message, "type": error.type, "code": error.status}


def error_response(error: SegueError, path: str, body: dict[str, Any] | None = None) -> Response:
    """Returns the answer to a request that failed before its reply began; ``path`` decides its form."""
    if body is None:
        body = openai_body(error) if path.startswith("/v1/") else native_body(error)
    kind = _LingeringResponse if error.status == 413 else Response
    return kind(encode(body), error.status, HEADERS.get(error.status), "application/json")


class RouteError(SegueError):
    """The route does not exist, or not with this method."""

    type = "invalid_request_error"

    def __init__(self, status: int, request: Request) -> None:
        reason = "no such route" if status == 404 else "wrong method"
        super().__init__(f"{request.method} {request.url.path}: {reason}")
        self.status = status
        self.code = "not_found" if status == 404 else "method_not_allowed"


class InternalError(SegueError):
    """A bug in the server; its traceback goes to the log, not to the client."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("internal error; the server's log has the details")


class _LingeringResponse(Response):
    """Answers at once, then reads and drops the rest of the body, within bounds.

    A socket that is closed with unread data is reset, and the client might never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
