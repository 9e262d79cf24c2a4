"""Reads request bodies up to a limit, decodes their JSON and checks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from segue.config import MIB
from segue.errors import RequestTooLargeError
from segue.server.large_body import Bounds, Shape, decode, not_json
from segue.server.service import service_of

T = TypeVar("T")
INLINE_BYTES = 1 << 14  # largest body that is decoded in one call, on the event loop


async def read_json(request: Request, check: Callable[[Any], T], shape: Callable[[Bounds], Shape]) -> T:
    """Returns the result of ``check`` for the decoded body; an empty body decodes to ``{}``.

    A body of more than ``INLINE_BYTES`` is decoded by its ``shape`` and checked in a thread.

    Raises:
        EngineStartError: the engine is still starting; the body was not read.
        RequestTooLargeError: the body exceeds the limit; no more than the limit was kept.
        InvalidRequestError: the body is not JSON, or has more than ``shape`` allows.
    """
    service = service_of(request)
    manager, bounds = service.manager, service.bounds
    data = await read_bytes(request, service.config.max_body_mib)
    if len(data) <= INLINE_BYTES:
        return check(_parse(data))
    return await manager.thread_pool.run(lambda: check(decode(data, shape(bounds))))


def _parse(data: bytes) -> Any:
    if not data:
        return {}
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


async def read_bytes(request: Request, limit_mib: int) -> bytes:
    """Returns the body; raises RequestTooLargeError above ``limit_mib`` MiB."""
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
    return RequestTooLargeError(
        f"the body is larger than {limit_mib} MiB; send less, or raise --max-body-mib"
    )
