"""Deadlines and limits for clients that hold connections, do not finish requests or do not read replies."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from segue.server.connections import (
    MAX_TICK_S,
    OTHERS_FIRST,
    Backpressure,
    ConnectionLimits,
    Connections,
    raise_descriptor_limit,
)
from tests.server.conftest import MODEL
from tests.server.live import LiveServer

MIB = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
COMPLETION = {"model": MODEL, "prompt": "abc", "max_tokens": 3, "ignore_eos": True}
FAST = ConnectionLimits(
    max_connections=100,
    head_s=0.3,
    idle_s=1.2,
    body_silence_s=0.3,
    body_rate=1000.0,
    body_grace_s=0.4,
    drain_s=0.3,
    reply_silence_s=0.4,
    stream_silence_s=0.6,
    sweep_s=0.1,
)
SLOW = 60.0  # far above every limit here, in seconds


def head(body: bytes, more: bytes = b"", *, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    line = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return line.encode() + b"Content-Length: %d\r\n" % len(body) + more + b"\r\n"


def request(more: bytes = b"", *, version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps(COMPLETION | fields).encode()
    return head(body, more, version=version) + body


class RawClient:
    """One client connection, for requests as raw bytes."""

    def __init__(self, server: LiveServer, *sent: bytes, receive_buffer: int | None = None) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(SLOW)
        self.socket.connect((host, int(port)))
        for data in sent:
            self.socket.sendall(data)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def all(self) -> bytes:
        """Returns the bytes received until the server closes the connection."""
        parts = []
        try:
            while part := self.socket.recv(1 << 16):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)

    def until(self, end: bytes) -> bytes:
        """Returns the bytes received, up to and including ``end``."""
        data = b""
        while not data.endswith(end):
            part = self.socket.recv(1 << 16)
            assert part, f"closed after {data!r}"
            data += part
        return data

    def is_readable(self, seconds: float) -> bool:
        """Whether bytes, or the end of the connection, arrive within ``seconds``."""
        return bool(select.select([self.socket], [], [], seconds)[0])

    def reply(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """Returns status, headers and body of the answer; the server must close the connection after it."""
        return parse(self.all())


def parse(data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    top, _, body = data.partition(b"\r\n\r\n")
    line, *fields = top.split(b"\r\n")
    headers = dict(field.lower().split(b": ", 1) for field in fields)
    return int(line.split()[1]), headers, body


def limits(**changes: Any) -> ConnectionLimits:
    """Returns limits with 100 connections and the given changes, the defaults otherwise."""
    return ConnectionLimits(**({"max_connections": 100} | changes))


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Callable[..., LiveServer]]:
    with ExitStack() as stack:
        yield lambda limits, **options: stack.enter_context(LiveServer(tiny_model, limits=limits, **options))


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_model, limits=FAST) as server:
        yield server
        server.assert_nothing_left()


def total(server: LiveServer) -> int:
    """Returns the number of requests answered so far."""
    return server._http.server_state.total_requests


def num_connections(server: LiveServer) -> int:
    return len(server._http.server_state.connections)


# --- deadlines ---


def test_an_incomplete_head_is_answered_408(fast: LiveServer) -> None:
    with RawClient(fast, HEAD) as client:
        status, headers, body = client.reply()
    assert (status, headers[b"connection"]) == (408, b"close")
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_sending_header_by_header_does_not_extend_the_deadline_of_the_head(fast: LiveServer) -> None:
    with RawClient(fast, HEAD) as client:
        began = time.monotonic()
        while not client.is_readable(0.02):
            client.send(b"X-Drip: 1\r\n")
            assert time.monotonic() - began < SLOW
        assert client.reply()[0] == 408


def test_a_new_connection_without_a_byte_is_closed_without_an_answer(fast: LiveServer) -> None:
    with RawClient(fast) as client:
        assert client.all() == b""


def test_a_connection_between_two_requests_is_kept_longer_than_a_silent_new_one(fast: LiveServer) -> None:
    with RawClient(fast, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
        client.until(b'"ok"}')
        answered = time.monotonic()
        assert client.all() == b""
        assert time.monotonic() - answered > FAST.head_s


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_body_that_stops_arriving_is_answered_408(fast: LiveServer, path: str) -> None:
    with RawClient(fast, head(b"x" * 100_000, path=path), b"{" * 2000) as client:
        status, headers, body = client.reply()
    assert (status, headers[b"connection"]) == (408, b"close")
    error = json.loads(body)
    assert (error["error"]["code"] if path.startswith("/v1") else error["code"]) in ("request_timeout", 408)
    assert b"0.3 s" in body


def test_a_body_that_arrives_too_slowly_is_answered_408(fast: LiveServer) -> None:
    with RawClient(fast, head(b"x" * 100_000)) as client:
        began = time.monotonic()
        while not client.is_readable(0.02):
            client.send(b" ")
            assert time.monotonic() - began < SLOW
        status, _, body = client.reply()
    assert (status, b"1000 bytes per second" in body) == (408, True)


def test_a_slow_body_above_the_minimum_rate_is_accepted(fast: LiveServer) -> None:
    body = json.dumps(COMPLETION | {"user": "x" * 30_000}).encode()
    with RawClient(fast, head(body, b"Connection: close\r\n")) as client:
        for start in range(0, len(body), 1000):
            assert not client.is_readable(0.02)
            client.send(body[start : start + 1000])
        assert client.reply()[0] == 200


def test_a_slow_engine_does_not_make_a_client_miss_a_deadline(
    start: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.3")
    server = start(FAST)
    with RawClient(server, request(b"Connection: close\r\n", max_tokens=5)) as client:
        assert client.reply()[0] == 200


def test_the_rest_of_an_unread_body_is_read_so_that_the_client_sees_the_answer(
    start: Callable[..., LiveServer],
) -> None:
    server = start(FAST, api_key="secret")
    with RawClient(server, head(b"x" * 10_000_000), b"{" * 2000) as client:
        data = client.all()
    assert data.startswith(b"HTTP/1.1 401")
    assert data.count(b"HTTP/1.1") == 1


def test_a_stalled_server_does_not_make_clients_miss_deadlines() -> None:
    connections = Connections(FAST)
    connections.tick(100.0)
    connections.tick(100.1)
    connections.tick(700.0)
    assert connections.now == pytest.approx(0.1 + MAX_TICK_S)


# --- replies that the client does not read ---


def test_a_finished_reply_that_the_client_does_not_read_is_dropped(fast: LiveServer, wait_until: Any) -> None:
    get = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = total(fast)
    with RawClient(fast, get, receive_buffer=4096) as client:
        wait_until(lambda: (num_connections(fast), total(fast)) == (1, before + 1))
        (connection,) = fast._http.server_state.connections
        for count in range(2, 20_000):
            began = time.monotonic()
            client.send(get)
            wait_until(lambda count=count: total(fast) == before + count)
            if connection.transport.get_write_buffer_size() or connection.transport.is_closing():
                break
        wait_until(lambda: num_connections(fast) == 0, SLOW)
        assert time.monotonic() - began >= FAST.reply_silence_s


def test_a_stream_that_the_client_does_not_read_is_dropped_and_its_request_aborted(
    start: Callable[..., LiveServer], wait_until: Any
) -> None:
    server = start(FAST, max_model_len=100_000, num_kv_tokens=200_000)
    params = {"max_new_tokens": 90_000, "ignore_eos": True}
    body = json.dumps({"text": "abc", "sampling_params": params, "stream": True}).encode()
    with RawClient(server, head(body, path="/generate") + body, receive_buffer=4096):
        wait_until(lambda: server.runtime.manager.num_requests == 1)
        wait_until(lambda: server.runtime.manager.num_requests == 0)
    assert server.runtime.manager.stats.finished["abort"] == 1
    server.assert_nothing_left()


# --- bounds ---


def test_the_connection_that_waits_longest_is_closed_for_a_new_one(
    start: Callable[..., LiveServer], wait_until: Any
) -> None:
    server = start(limits(max_connections=10, evict_after_s=0.0))
    with ExitStack() as stack:
        silent = [stack.enter_context(RawClient(server)) for _ in range(10)]
        half = []
        for _ in range(10):
            half.append(stack.enter_context(RawClient(server)))
            wait_until(lambda: num_connections(server) == 10)
            half[-1].send(HEAD)
        assert all(client.all() == b"" for client in silent)
        last = [stack.enter_context(RawClient(server)) for _ in range(10)]
        refused = [client.reply() for client in half]
        assert {status for status, _, _ in refused} == {503}
        assert refused[0][1][b"retry-after"] == b"1"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert sum(client.is_readable(0.0) for client in last) == 1


def test_connections_with_incomplete_bodies_are_closed_for_new_ones(start: Callable[..., LiveServer]) -> None:
    few = limits(max_connections=10, spare_connections=2, stalled_after_s=0.0, sweep_s=0.1, body_grace_s=60.0)
    server = start(few)
    with ExitStack() as stack:
        for _ in range(3):
            for _ in range(12):
                stack.enter_context(RawClient(server, head(b"x" * 100_000), b"{"))
            deadline = time.monotonic() + SLOW
            while httpx.post(f"{server.url}/v1/completions", json=COMPLETION).status_code != 200:
                assert time.monotonic() < deadline


def test_when_every_connection_is_busy_only_health_routes_are_answered(
    start: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    server = start(limits(max_connections=5, spare_connections=2))
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(RawClient(server, request(stream=True, max_tokens=400)))
        wait_until(lambda: server.runtime.manager.num_requests == 5)
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = httpx.post(f"{server.url}/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["connection"] == "close"
        assert server.runtime.manager.num_requests == 5
    wait_until(lambda: server.runtime.manager.num_requests == 0)


def test_the_number_of_connections_follows_from_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for soft, most in ((1024, 896), (100, 25), (1 << 20, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert ConnectionLimits.of_this_process(16).max_connections == most


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 1024, None),
        (1024, 4096, 4096),
        (1024, 1 << 20, 8320),
        (1024, resource.RLIM_INFINITY, 8320),
        (20_000, 1 << 20, None),
    ],
)
def test_the_soft_limit_of_open_files_is_raised_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None
) -> None:
    was_set = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: was_set.append(both))
    raise_descriptor_limit()
    assert was_set == ([] if raised is None else [(raised, hard)])


def test_connections_that_need_several_open_files_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 298), (12, 1), (1 << 20, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert ConnectionLimits.of_this_process(16, descriptors_each=3).max_connections == most


def test_the_soft_limit_is_raised_for_connections_that_need_several_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was_set = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: was_set.append(both))
    raise_descriptor_limit(descriptors_each=3)
    assert was_set == [(3 * 8192 + 128, 1 << 20)]


def test_the_limit_of_body_bytes_follows_from_the_largest_body() -> None:
    assert ConnectionLimits.of_this_process(16).body_bytes == 64 * MIB
    assert ConnectionLimits.of_this_process(100).body_bytes == 400 * MIB


def test_incomplete_bodies_are_bounded_in_total_and_fast_ones_are_accepted(
    start: Callable[..., LiveServer], wait_until: Any
) -> None:
    bound = limits(body_bytes=4 * MIB, crowded_grace_s=0.2, crowded_rate=0.4 * MIB, sweep_s=0.1)
    server = start(bound)
    connections = server._http._connections
    half = head(b" " * 900_000), b" " * 800_000
    with ExitStack() as stack:
        halves = [stack.enter_context(RawClient(server, *half)) for _ in range(8)]
        body = json.dumps(COMPLETION | {"user": "x" * 2 * MIB}).encode()
        answer = httpx.post(f"{server.url}/v1/completions", content=body, timeout=SLOW)
        assert answer.status_code == 200
        wait_until(lambda: connections.num_bytes <= 4 * MIB)
        refused = [client.reply() for client in halves if client.is_readable(0.0)]
        assert {(status, headers[b"retry-after"]) for status, headers, _ in refused} == {(503, b"1")}
        assert len(refused) >= 3
    wait_until(lambda: connections.num_bytes == 0)


def test_many_large_bodies_at_once_are_read_one_after_the_other(start: Callable[..., LiveServer]) -> None:
    server = start(limits(body_bytes=4 * MIB, crowded_rate=1000.0))
    body = json.dumps(COMPLETION | {"user": "x" * 3_000_000}).encode()
    sent = head(body, b"Connection: close\r\n") + body
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server)) for _ in range(8)]
        threads = [Thread(target=client.send, args=(sent,)) for client in clients]
        for thread in threads:
            thread.start()
        assert [client.reply()[0] for client in clients] == [200] * 8
        for thread in threads:
            thread.join()
    assert server._http._connections.num_bytes == 0


def test_a_held_body_is_read_only_when_the_application_has_room_too() -> None:
    class Transport(asyncio.Transport):
        is_reading_now = True
        is_closed = False

        def is_closing(self) -> bool:
            return self.is_closed

        def pause_reading(self) -> None:
            self.is_reading_now = False

        def resume_reading(self) -> None:
            self.is_reading_now = True

    transport, connections = Transport(), Connections(FAST)
    flow = Backpressure(transport, connections)
    flow.pause_reading(OTHERS_FIRST)
    flow.resume_reading()
    assert not transport.is_reading_now
    flow.pause_reading()
    flow.resume_reading(OTHERS_FIRST)
    assert not transport.is_reading_now
    connections.now = 5.0
    assert flow.unpaused(7.0) == 0.0
    flow.resume_reading()
    assert transport.is_reading_now
    assert (flow.resumed_at, flow.unpaused(9.0)) == (5.0, 4.0)
    flow.pause_reading(OTHERS_FIRST)
    transport.is_closed = True
    flow.resume_reading(OTHERS_FIRST)
    assert not transport.is_reading_now


def test_the_body_of_a_request_without_a_key_is_not_kept(
    start: Callable[..., LiveServer], wait_until: Any
) -> None:
    server = start(limits(), api_key="secret")
    with ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(RawClient(server, head(b"x" * 10_000_000), b"x" * 200_000))
            assert client.socket.recv(1 << 16).startswith(b"HTTP/1.1 401")
        wait_until(lambda: server._http._connections.num_bytes == 0)


def test_a_request_with_too_many_headers_is_refused(fast: LiveServer) -> None:
    with RawClient(fast, HEAD + b"a:\r\n" * 200) as client:
        status, _, body = client.reply()
    assert (status, b"more than 128 headers" in body) == (400, True)


def test_too_many_pipelined_requests_are_refused(
    start: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    server = start(limits())
    with RawClient(server, request(max_tokens=400)) as client:
        wait_until(lambda: server.runtime.manager.num_requests == 1)
        client.send(b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        assert client.all() == b""
    wait_until(lambda: server.runtime.manager.num_requests == 0)
    assert server.runtime.manager.stats.finished["abort"] == 1


def test_pipelined_requests_are_answered_in_order(fast: LiveServer) -> None:
    get = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    paths = [b"/version", b"/health", b"/v1/models"] * 4
    last = get % (b"/health", b"Connection: close\r\n")
    with RawClient(fast, *(get % (path, b"") for path in paths), last) as client:
        data = client.all()
    assert data.count(b"HTTP/1.1 200") == 13
    assert data.index(b'"version"') < data.index(b'"status"') < data.index(b'"object":"list"')


# --- requests that a proxy may understand in another way than the server ---


def test_a_trailer_does_not_count_as_a_header(fast: LiveServer) -> None:
    top = b"GET /v1/models HTTP/1.1\r\nHost: attacker.example\r\nConnection: close\r\n"
    with RawClient(fast, top + b"Transfer-Encoding: chunked\r\n\r\n0\r\nHost: localhost\r\n\r\n") as client:
        status, _, body = client.reply()
    assert (status, b"attacker.example" in body) == (403, True)


def test_a_body_after_a_split_upgrade_header_is_not_parsed_as_a_request(server: LiveServer) -> None:
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    upgrade = head(get, b"Connection: Upgrade\r\nUpgrade: h2c\r\n")
    begin, end = upgrade.split(b"ade: h2c")
    with RawClient(server, begin) as client:
        httpx.get(server.url + "/health")  # when this is answered, the first part has been read
        client.send(b"ade: h2c" + end + get)
        data = client.all()
    assert (data.count(b"content-length"), parse(data)[0]) == (1, 400)
    assert b"send plain HTTP/1.1" in data


# --- HTTP/1.0 and half-closed connections ---


def test_an_http_1_0_client_gets_no_100_continue(fast: LiveServer) -> None:
    with RawClient(fast, request(b"Expect: 100-continue\r\n", version="1.0")) as client:
        assert client.reply()[0] == 200


def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(fast: LiveServer) -> None:
    with RawClient(fast, request(version="1.0", stream=True)) as client:
        status, headers, body = client.reply()
    assert (status, headers[b"connection"]) == (200, b"close")
    assert b"transfer-encoding" not in headers
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_http_1_0_is_closed_unless_it_asks_to_be_kept(fast: LiveServer) -> None:
    with RawClient(fast, request(version="1.0")) as client:
        status, headers, body = client.reply()
        assert (status, headers[b"connection"], len(body)) == (200, b"close", int(headers[b"content-length"]))
    with RawClient(fast) as client:
        for _ in range(2):
            client.send(request(b"Connection: keep-alive\r\n", version="1.0"))
            status, headers, _ = parse(client.until(b"}}"))
            assert (status, headers[b"connection"]) == (200, b"keep-alive")


def test_a_stream_to_http_1_0_ends_the_connection_despite_keep_alive(fast: LiveServer) -> None:
    with RawClient(fast, request(b"Connection: keep-alive\r\n", version="1.0", stream=True)) as client:
        status, headers, body = client.reply()
    assert (status, headers[b"connection"], body[-8:]) == (200, b"close", b"[DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_counts_as_disconnected(
    start: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, wait_until: Any, stream: bool
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    server = start(limits())
    with RawClient(server, request(stream=stream, max_tokens=400)) as client:
        wait_until(lambda: server.runtime.manager.num_requests == 1)
        client.socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.runtime.manager.num_requests == 0)
        client.all()
    assert server.runtime.manager.stats.finished["abort"] == 1
    server.assert_nothing_left()
