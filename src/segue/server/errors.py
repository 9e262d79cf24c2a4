"""Turns errors into HTTP replies: :mod:`segue.errors` has status, type and code, this module the bodies."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from segue.config import MIB
from segue.errors import RequestTooLargeError, SegueError

RETRY_AFTER_S = 1
DRAINED_MIB = 64  # of a too large body, read and dropped so that the client reads the answer
DRAIN_S = 3.0


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a reply with ``content`` as JSON; msgspec must be able to encode it."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def openai_body(error: SegueError) -> dict[str, Any]:
    """Returns the body of an error on OpenAI routes."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def native_body(error: SegueError) -> dict[str, Any]:
    """Returns the body of an error on control and native routes."""
    return {"object": "error", "message": error.message, "type": error.type, "code": error.status}


def is_openai(path: str) -> bool:
    """Whether a path belongs to the OpenAI API, whose errors have a form of their own."""
    return path.startswith("/v1/")


def error_response(error: SegueError, path: str, body: dict[str, Any] | None = None) -> Response:
    """Returns the answer to a request that failed before its reply began; ``path`` decides its form."""
    if body is None:
        body = openai_body(error) if is_openai(path) else native_body(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, RequestTooLargeError):
        return _LingeringResponse(
            msgspec.json.encode(body), error.status, {"connection": "close"}, "application/json"
        )
    return json_response(body, error.status, headers)


class RouteError(SegueError):
    """The route does not exist, or not with this method."""

    type = "invalid_request_error"

    def __init__(self, status: int, request: Request) -> None:
        super().__init__(
            f"{request.method} {request.url.path}: {'no such route' if status == 404 else 'wrong method'}"
        )
        self.status = status
        self.code = "not_found" if status == 404 else "method_not_allowed"


class InternalError(SegueError):
    """A bug in the server; its traceback goes to the log, not to the client."""

    code = "internal_error"


class _LingeringResponse(Response):
    """Answers at once, then reads and drops the rest of the body, within bounds.

    A socket that is closed with unread data is reset, and the client might never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            await asyncio.wait_for(_drain(receive), DRAIN_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    size = 0
    while size < DRAINED_MIB * MIB:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
