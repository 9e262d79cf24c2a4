from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from segue.config import EngineConfig
from segue.errors import RequestTooLargeError
from segue.frontend.sampling_options import RequestLimits
from segue.frontend.thread_pool import ThreadPool
from segue.server.body import read_json
from segue.server.large_generation import generate

MIB = 1 << 20


def request(*chunks: bytes, length: int | None = None) -> Request:
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        assert left, "read beyond the limit"
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    limits = RequestLimits(max_seq_len=100, vocab_size=50, eos_ids=())
    model = SimpleNamespace(encoder=SimpleNamespace(limits=limits), max_prompts=10)
    manager = SimpleNamespace(thread_pool=ThreadPool())
    runtime = SimpleNamespace(config=EngineConfig(max_body_mib=1), manager=manager, served_model=model)
    app = SimpleNamespace(state=SimpleNamespace(runtime=runtime))
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "app": app}
    return Request(scope, receive)


def read(given: Request) -> Any:
    return asyncio.run(read_json(given, lambda body: (body, threading.current_thread()), generate))


def test_chunks_are_joined_and_parsed() -> None:
    assert read(request(b'{"a":', b" [1]}"))[0] == {"a": [1]}


def test_an_empty_body_is_an_empty_object() -> None:
    assert read(request(b""))[0] == {}


def test_a_content_length_above_the_limit_is_refused_without_reading() -> None:
    with pytest.raises(RequestTooLargeError, match="1 MiB"):
        read(request(length=MIB + 1))


def test_reading_stops_at_the_limit() -> None:
    with pytest.raises(RequestTooLargeError):
        read(request(b"x" * MIB, b"x"))


@pytest.mark.parametrize(("size", "here"), [(1 << 14, True), ((1 << 14) + 1, False)])
def test_a_large_body_is_decoded_and_checked_in_a_thread(size: int, here: bool) -> None:
    begin = b'{"text": "'
    body, thread = read(request(begin + b"a" * (size - len(begin) - 2) + b'"}'))
    assert len(body["text"]) == size - len(begin) - 2
    assert (thread is threading.main_thread()) == here
