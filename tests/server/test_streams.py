"""Streams and replies to clients that disconnect or are slow, and replies when the engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.server import responses
from segue.server.responses import KEEP_ALIVE, EventStream
from tests.server.conftest import MODEL, Api
from tests.server.events import parse_events
from tests.server.legs import named_events
from tests.server.live import LiveServer
from tests.server.raw import posted

BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def slow(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server that takes 20 seconds for 400 tokens: no request ends before its test has done with it."""
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with LiveServer(tiny_model) as server:
        yield server


def test_comments_fill_silence_and_do_not_change_the_events(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.03)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
    native = {"text": "abc", "sampling_params": {"max_new_tokens": 3}}
    with LiveServer(tiny_model) as server:
        for path, body, text in (
            ("/v1/completions", BODY | {"max_tokens": 3}, "abc"),
            ("/v1/chat/completions", chat, "us"),
            ("/generate", native, "abc"),
        ):
            assert server.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
            lines = []
            with server.client.stream("POST", path, json=body | {"stream": True}) as response:
                for line in response.iter_lines():
                    lines += [line] if line else []
                    if lines == [": keep-alive"] * 3:
                        assert server.client.post("/continue_generation").status_code == 200
            *events, done = parse_events(iter(lines))
            assert lines[:3] == [": keep-alive"] * 3
            assert (done, lines[-1]) == ("[DONE]", "data: [DONE]")
            if path == "/generate":
                assert events[-1]["text"] == text
                continue
            choices = [choice for each in events for choice in each["choices"]]
            texts = [
                each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices
            ]
            assert "".join(texts) == text
        server.assert_nothing_left()


class AsgiClient:
    """The server's ASGI channels to one client; a test may block them."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.pending = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self.takes_comments = asyncio.Event()
        self.takes_comments.set()
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.pending += 1
        is_comment = message.get("body") == KEEP_ALIVE
        await (self.takes_comments if is_comment else self.writable).wait()
        self.pending -= 1
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def stream_to(
    client: AsgiClient, events: AsyncGenerator[bytes, None], closed: list[bool]
) -> asyncio.Task[None]:
    stream = EventStream(events, lambda error: b"", lambda: closed.append(True))
    return asyncio.create_task(stream({"type": "http"}, client.receive, client.send))


def test_comments_are_sent_only_when_no_event_is_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.02)

    async def work() -> None:
        client, more, closed = AsgiClient(), asyncio.Event(), list[bool]()

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"a"
            await more.wait()
            client.writable.clear()
            yield b"b"
            yield b"c"

        task = stream_to(client, events(), closed)
        while client.bodies.count(KEEP_ALIVE) < 2:
            await asyncio.sleep(0.001)
        more.set()
        while not client.pending:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # five times KEEP_ALIVE_S
        assert client.pending == 1
        count = client.bodies.count(KEEP_ALIVE)
        client.writable.set()
        await task
        assert client.bodies == [b"a", *[KEEP_ALIVE] * count, b"b", b"c", b""]
        assert closed == [True]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_the_end_of_a_stream_waits_for_a_blocked_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.02)

    async def work() -> None:
        client, more = AsgiClient(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            client.takes_comments.clear()
            await more.wait()
            yield b"a"

        task = stream_to(client, events(), [])
        while not client.pending:
            await asyncio.sleep(0.001)
        more.set()
        for _ in range(10):
            await asyncio.sleep(0)
        client.takes_comments.set()
        await task
        assert client.bodies == [KEEP_ALIVE, b"a", b""]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_disconnect_during_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.01)

    async def work() -> None:
        client, closed = AsgiClient(), list[bool]()

        async def events() -> AsyncGenerator[bytes, None]:
            await asyncio.Event().wait()
            yield b""

        task = stream_to(client, events(), closed)
        while not client.bodies:
            await asyncio.sleep(0.001)
        client.gone.set()
        await task
        assert closed == [True]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_stream_whose_sending_fails_is_closed() -> None:
    async def work() -> None:
        client, closed = AsgiClient(), list[bool]()

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"a"

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise RuntimeError("the transport has failed")

        client.send = send  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="transport"):
            await stream_to(client, events(), closed)
        assert closed == [True]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_disconnect_aborts_a_stream(slow: LiveServer, wait_until: Any) -> None:
    with slow.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        next(response.iter_lines())
        assert slow.runtime.manager.num_requests == 1
    wait_until(lambda: slow.runtime.manager.num_requests == 0)
    slow.assert_nothing_left()
    assert slow.runtime.manager.stats.finished["abort"] == 1


NATIVE = {"text": ["abc", "def"], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/completions", BODY, 1),
        ("/v1/completions", BODY | {"prompt": ["abc", "def", "ghi"]}, 3),
        ("/generate", NATIVE, 2),
    ],
    ids=["one prompt", "three prompts", "native"],
)
def test_a_disconnect_aborts_a_request_that_is_not_streamed(
    slow: LiveServer,
    wait_until: Any,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    count: int,
) -> None:
    manager = slow.runtime.manager
    with posted(slow, path, body):
        wait_until(lambda: manager.stats.counters.num_running == count)
    wait_until(lambda: manager.num_requests == 0)
    slow.assert_nothing_left()
    assert {reason: each for reason, each in manager.stats.finished.items() if each} == {"abort": count}
    assert "Exception" not in caplog.text


def test_a_disconnect_within_a_body_leaves_nothing_behind(
    server: LiveServer, wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls = server._http.server_state.tasks
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
        )
        wait_until(lambda: calls)
    wait_until(lambda: not calls)
    assert caplog.text == ""
    assert server.client.get("/health").status_code == 200


def test_a_client_that_does_not_read_gets_fewer_and_larger_events(tiny_model: Path, wait_until: Any) -> None:
    count = 4000
    with LiveServer(tiny_model, max_model_len=8192) as server:
        host, port = server.url.removeprefix("http://").split(":")
        params = {"max_new_tokens": count, "ignore_eos": True}
        # Each native event repeats the text so far: without coalescing this would be tens of megabytes.
        body = json.dumps({"text": "abc", "sampling_params": params, "stream": True}).encode()
        head = "POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.runtime.manager.stats.counters.output_tokens >= count)
            data = b""
            while block := connection.recv(1 << 16):
                data += block
        events = data.count(b"data: {")
        assert b"data: [DONE]" in data
        assert b"abc" * (count // 3) in data
        assert events < count / 2
        server.assert_nothing_left()


def test_a_slow_client_does_not_delay_another(slow: LiveServer) -> None:
    body = BODY | {"stream": True, "max_tokens": 400}
    with slow.client.stream("POST", "/v1/completions", json=body):  # it reads nothing
        assert Api(slow.client).complete("abc", max_tokens=5).is_success
        assert slow.runtime.manager.stats.counters.num_running == 1


def test_the_death_of_the_engine_is_an_event_in_the_stream(slow: LiveServer) -> None:
    with slow.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        events = parse_events(response.iter_lines())
        next(events)
        os.kill(slow.runtime.worker_pids[0], signal.SIGKILL)
        *_, last = events
    assert last["error"]["code"] == "engine_dead"
    assert "SIGKILL" in last["error"]["message"]


def _until_text(parts: Iterator[bytes]) -> bytes:
    """Returns what a stream has sent when the first piece of its text is there."""
    data = b""
    while b"output_text.delta" not in data:
        data += next(parts)
    return data


def test_a_response_that_is_aborted_or_loses_its_engine_has_failed(slow: LiveServer) -> None:
    asked = {"model": MODEL, "input": "abc", "max_output_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        slow.client.stream("POST", "/v1/responses", json=asked | {"rid": "mine"}) as aborted,
        slow.client.stream("POST", "/v1/responses", json=asked) as lost,
    ):
        parts, others = aborted.iter_bytes(), lost.iter_bytes()
        begun, other = _until_text(parts), _until_text(others)
        slow.client.post("/abort_request", json={"rid": "mine", "aborted_message": "By hand."})
        first = named_events(begun + b"".join(parts))
        os.kill(slow.runtime.worker_pids[0], signal.SIGKILL)
        second = named_events(other + b"".join(others))
    for events, message in ((first, "By hand."), (second, "SIGKILL")):
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
        assert response["error"]["code"] == "server_error" and message in response["error"]["message"]
        assert response["output"][0]["status"] == "incomplete"


def test_the_death_of_the_engine_is_503_for_waiting_and_for_new_requests(
    slow: LiveServer, wait_until: Any
) -> None:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(Api(slow.client).complete("abc", max_tokens=400)))
    thread.start()
    wait_until(lambda: slow.runtime.manager.num_requests == 1)
    os.kill(slow.runtime.worker_pids[0], signal.SIGKILL)
    thread.join(60)
    answers.append(Api(slow.client).complete("abc"))
    answers.append(slow.client.get("/health"))
    assert [answer.status_code for answer in answers] == [503] * 3
    assert all("retry-after" in answer.headers for answer in answers)


def test_too_many_requests_are_503_with_retry_after(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with LiveServer(tiny_model, max_queued_requests=1, max_running_requests=1) as server:
        api, now = Api(server.client), server.runtime.manager.stats
        assert server.client.post("/pause_generation", json={"mode": "in_place"}).is_success
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(api.complete("abc", max_tokens=2)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) == 7, what="all but the one that may wait are refused")
        server.client.post("/continue_generation")
        for thread in threads:
            thread.join(60)
        *refused, accepted = answers
        assert accepted.is_success and {answer.status_code for answer in refused} == {503}
        assert refused[0].json()["error"]["code"] == "overloaded"
        assert refused[0].headers["retry-after"] == "1"
        holders = [threading.Thread(target=lambda: api.complete("abc", max_tokens=400)) for _ in range(2)]
        holders[0].start()
        wait_until(lambda: now.counters.num_running == 1)
        holders[1].start()
        wait_until(lambda: now.counters.num_waiting == 1)
        assert api.complete("abc", stream=True).status_code == 503  # rather than 200 and an error event
        server.client.post("/abort_request", json={"abort_all": True})
        for holder in holders:
            holder.join()
        server.assert_nothing_left()


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_partly_refused_batch_is_answered_without_waiting_for_the_rest(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any, path: str
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with LiveServer(tiny_model, max_queued_requests=2, max_running_requests=1) as server:
        now = server.runtime.manager.stats
        hold = partial(server.client.post, "/v1/completions", json=BODY)
        holders = [threading.Thread(target=hold) for _ in range(2)]
        for index, holder in enumerate(holders):
            holder.start()
            wait_until(lambda n=index: (now.counters.num_running, now.counters.num_waiting) == (1, n))
        batch = {"prompt": ["a", "b"]} if path.startswith("/v1") else {"text": ["a", "b"]}
        assert server.client.post(path, json=BODY | batch).status_code == 503
        assert all(holder.is_alive() for holder in holders)
        server.client.post("/abort_request", json={"abort_all": True})
        for holder in holders:
            holder.join()
        server.assert_nothing_left()
