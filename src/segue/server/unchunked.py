"""Replies to clients of HTTP/1.0, which cannot read chunks."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(application: ASGIApp, keep_alive: bool) -> ASGIApp:
    """Returns the application for one HTTP/1.0 request: without chunks, the connection's end may end a reply.

    The connection is kept only if the client asked for it (``keep_alive``) and the reply's length is known.
    """

    async def answer(scope: Scope, receive: Receive, send: Any) -> None:
        """Answer as the application does, through a ``send`` that adapts the reply."""
        cycle: RequestResponseCycle = send.__self__  # uvicorn passes a method of the cycle
        has_length = False

        async def send_unchunked(message: Message) -> None:
            """Send a part of the reply, after setting the cycle such that uvicorn makes no chunks of it."""
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                has_length = b"content-length" in names
                cycle.keep_alive = keep_alive and has_length
                if not has_length:
                    cycle.chunked_encoding = False
                elif keep_alive and b"connection" not in names:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"keep-alive")]}
            elif not has_length:  # uvicorn compares each part with the length that is still to come
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await application(scope, receive, send_unchunked)

    return answer
