from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from starlette.requests import Request

from segue.errors import InvalidRequestError, RequestTooLargeError
from segue.server.body import read_json

MIB = 1 << 20


def request(*chunks: bytes, length: int | None = None) -> Request:
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        assert left, "read beyond the limit"
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def read(given: Request, check: Any = lambda body: body) -> Any:
    return asyncio.run(read_json(given, 1, check))


def test_chunks_are_joined_and_parsed() -> None:
    assert read(request(b'{"a":', b" [1]}")) == {"a": [1]}


def test_an_empty_body_is_an_empty_object() -> None:
    assert read(request(b"")) == {}


def test_an_announced_size_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(RequestTooLargeError, match="1 MiB"):
        read(request(length=MIB + 1))


def test_reading_stops_at_the_limit() -> None:
    with pytest.raises(RequestTooLargeError):
        read(request(b"x" * MIB, b"x"))


def test_the_collector_rests_while_a_body_is_parsed_and_checked() -> None:
    assert read(request(b"{}"), lambda _: gc.isenabled()) is False
    assert gc.isenabled()
    with pytest.raises(InvalidRequestError):
        read(request(b"{"))
    assert gc.isenabled()
