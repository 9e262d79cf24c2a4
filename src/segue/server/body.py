"""Reads request bodies up to a limit, decodes their JSON and checks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from segue.frontend.tokenizer import ServedModel
from segue.launch.runtime import Runtime
from segue.server.large_body import Shape, decode, not_json
from segue.server.raw_body import read_bytes
from segue.server.running import runtime_of

T = TypeVar("T")
INLINE_BYTES = 1 << 14  # largest body that is decoded in one call, on the event loop


async def read_json(request: Request, check: Callable[[Any], T], shape: Callable[[ServedModel], Shape]) -> T:
    """Returns the result of ``check`` for the decoded body; an empty body decodes to ``{}``.

    ``shape`` makes, of the served model, the :class:`Shape` that says which fields may be large. By it a body
    of more than ``INLINE_BYTES`` is decoded, in a thread, where it is checked too.

    Raises:
        EngineStartError: the engine is still starting; the body was not read.
        RequestTooLargeError: the body exceeds the limit; no more than the limit was kept.
        InvalidRequestError: the body is not JSON, or has more than ``shape`` allows.
    """
    runtime = runtime_of(request)
    return await decode_json(runtime, await read_bytes(request, runtime.config.max_body_mib), check, shape)


async def decode_json(
    runtime: Runtime, data: bytes, check: Callable[[Any], T], shape: Callable[[ServedModel], Shape]
) -> T:
    """Returns the result of ``check`` for a body that has been read; see :func:`read_json`."""
    if len(data) > INLINE_BYTES:
        model = runtime.served_model
        return await runtime.manager.thread_pool.run(lambda: check(decode(data, shape(model))))
    try:
        body = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    return check(body)
