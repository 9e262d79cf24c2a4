"""Replies to HTTP/1.0 clients: without chunked encoding, the end of the connection can end a reply."""

from __future__ import annotations

from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Http10Application:
    """Wraps the application for one HTTP/1.0 request."""

    def __init__(self, application: ASGIApp, keep_alive: bool) -> None:
        self._application = application
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the connection is kept only if the client asked for it and the reply's length is known."""
        cycle = cast(RequestResponseCycle, cast(Any, send).__self__)

        async def send_unchunked(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                cycle.keep_alive = self._keep_alive and b"content-length" in names
                if b"content-length" not in names:
                    cycle.chunked_encoding = False
                elif cycle.keep_alive and b"connection" not in names:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"keep-alive")]}
                self._has_length = b"content-length" in names
            elif not self._has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._application(scope, receive, send_unchunked)
