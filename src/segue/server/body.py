"""Request bodies: read up to a limit, parsed as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from segue.config import MIB
from segue.errors import InvalidRequestError, RequestTooLargeError


async def read_json(request: Request, limit_mib: int) -> Any:
    """The parsed body; an empty one is ``{}``.

    Raises:
        RequestTooLargeError: more than the limit, found out without reading it.
        InvalidRequestError: not JSON.
    """
    data = await read_bytes(request, limit_mib)
    if not data:
        return {}
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None


async def read_bytes(request: Request, limit_mib: int) -> bytes:
    """The body, if it is within the limit."""
    limit = limit_mib * MIB
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit_mib)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit_mib)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit_mib: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than {limit_mib} MiB, the limit set by --max-body-mib")
