"""The id of each request: the client's ``X-Request-Id``, or a random one. The reply has it in that header."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterable
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.logs import RequestMark, current_request, logger

HEADER = b"x-request-id"
_EXTENSION = "segue.request_id"
_VALID = re.compile(rb"[ -~]{1,256}")  # printable ASCII: it stands in lines of the log, and in the reply


def taken_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns the id that a request's headers give; a random one if they give none, or one that is not valid.

    A header that a proxy has added must not make a request fail; the reply shows which id was taken.
    """
    for name, value in headers:
        if name == HEADER and _VALID.fullmatch(value):
            return value.decode("ascii")
    return secrets.token_hex(16)


def id_extension(request_id: str) -> dict[str, dict[object, object]]:
    """Returns what a server adds to a scope's extensions to say the request's id, and that it came now."""
    return {_EXTENSION: {"id": request_id, "at": time.monotonic()}}


def id_of(scope: Scope) -> str:
    """Returns the id of a request; "": its server gives none."""
    found: str = scope.get("extensions", {}).get(_EXTENSION, {}).get("id", "")
    return found


def arrival_of(scope: Scope) -> float:
    """Returns when the head of a request came, by the monotonic clock; now, if its server does not say."""
    found: float = scope.get("extensions", {}).get(_EXTENSION, {}).get("at", 0.0)
    return found or time.monotonic()


def marked(app: ASGIApp) -> ASGIApp:
    """Returns the application, whose lines of the log name the request; at the level "debug" each has one."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        mark = RequestMark(id_of(scope))
        current_request.set(mark)  # each request has a task of its own
        status, began = 0, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        shows = logger.isEnabledFor(logging.DEBUG)
        try:
            await app(scope, receive, noting if shows else send)
        finally:
            if shows:
                path, took = scope["raw_path"].decode("ascii"), (time.monotonic() - began) * 1e3
                logger.debug("%s %s: %d after %.1f ms", scope["method"], path, status, took)
            # Later, because the server logs an error that leaves this function.
            asyncio.get_running_loop().call_soon(partial(setattr, mark, "is_over", True))

    return answer
