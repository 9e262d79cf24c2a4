"""Encodes replies that are too large to be encoded in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.responses import Response

from segue.frontend.thread_pool import INLINE_ENTRIES, ThreadPool
from segue.server.errors import json_response

ITEMS = 256  # items of a list that are encoded in one call
_encode = msgspec.json.Encoder().encode


async def reply_response(content: Any, num_entries: int, thread_pool: ThreadPool) -> Response:
    """Returns a JSON reply. With more than ``INLINE_ENTRIES`` entries, a thread encodes it in pieces."""
    if num_entries <= INLINE_ENTRIES:
        return json_response(content)
    data = await thread_pool.run(lambda: b"".join(json_pieces(content)))
    return Response(data, media_type="application/json")


def json_pieces(content: Any) -> Iterator[bytes]:
    """Yields JSON in pieces; each takes one call into C, which encodes a bounded number of values."""
    if isinstance(content, dict) and content:
        yield b"{"
        for index, (name, value) in enumerate(content.items()):
            yield b"%b%b:" % (b"," if index else b"", _encode(name))
            yield from json_pieces(value)
        yield b"}"
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        yield b"["
        for index, value in enumerate(content):
            if index:
                yield b","
            yield from json_pieces(value)
        yield b"]"
    elif isinstance(content, list) and len(content) > ITEMS:
        for start in range(0, len(content), ITEMS):
            yield b"," if start else b"["
            yield _encode(content[start : start + ITEMS])[1:-1]
        yield b"]"
    else:
        yield _encode(content)
