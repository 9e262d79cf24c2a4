"""Request bodies: read up to a limit, parsed as JSON, checked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from segue.config import MIB
from segue.errors import InvalidRequestError, RequestTooLargeError

T = TypeVar("T")


async def read_json(request: Request, limit_mib: int, check: Callable[[Any], T]) -> T:
    """What ``check`` makes of the parsed body; an empty one is ``{}``.

    Raises:
        RequestTooLargeError: more than the limit, found out without reading it.
        InvalidRequestError: not JSON.
    """
    data = await read_bytes(request, limit_mib)
    with _collector_paused():
        return check(_parse(data))


def _parse(data: bytes) -> Any:
    if not data:
        return {}
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection, which would go through a body of millions of lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
