"""Reads request bodies up to a limit."""

from __future__ import annotations

from starlette.requests import Request

from segue.config import MIB
from segue.errors import RequestTooLargeError


async def read_bytes(request: Request, limit_mib: int, remedy: str = "raise --max-body-mib") -> bytes:
    """Returns the body; raises RequestTooLargeError above ``limit_mib`` MiB, which names the ``remedy``.

    A body whose ``Content-Length`` is above the limit is not read. Where that header is absent or wrong, the
    received bytes are counted.
    """
    limit = limit_mib * MIB
    announced = request.headers.get("content-length", "")
    if not announced.isdigit() or int(announced) <= limit:
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                break
            chunks.append(chunk)
        else:  # the body ended within the limit
            return b"".join(chunks)
    text = f"the body is larger than {limit_mib} MiB; send less, or {remedy}"
    raise RequestTooLargeError(text)
