"""Replies of workers that are no frames: whole bodies, and which of their headers clients get."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from segue.router.upstream_connection import Headers, UpstreamConnection

# Headers of replies that clients get.
PASSED_ON = frozenset((b"content-type", b"cache-control", b"x-accel-buffering", b"retry-after"))


async def read_whole(connection: UpstreamConnection) -> bytes:
    """Returns the body of a reply. Raises UpstreamError if the connection ends before it."""
    parts = []
    while data := await connection.read():
        parts.append(data)
    return b"".join(parts)


def passed_on(headers: Headers) -> Headers:
    """Returns the headers of a reply that the client gets."""
    return [header for header in headers if header[0] in PASSED_ON]


def code_of(body: bytes) -> str | None:
    """Returns the code of an error's body, in OpenAI's form or the native one; None: it has none."""
    with suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):  # it may have any form
        content = msgspec.json.decode(body)
        code = content["error"]["code"] if "error" in content else content["error_code"]
        return None if code is None else str(code)
    return None
