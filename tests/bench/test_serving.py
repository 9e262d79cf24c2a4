"""Servers that are not Segue's: other routes, line ends, TLS. test_http_compare.py has loads on real ones."""

from __future__ import annotations

import asyncio
import json

import pytest

from segue.bench.client import Client, Job, StreamingRequest, base_url, clock
from segue.bench.serving import model_of
from segue.errors import BenchmarkError

CHAT = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    'data: {"choices":[{"delta":{"role":"assistant"}}]}\r\n\r\n'
    'data:{"choices":[{"delta":{"reasoning_content":"so"}}]}\r\n\r\n'
    'data: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n'
    'data: {"choices":[{"delta":{"content":null}}]}\r\n\r\n'
    "data: [DONE]\r\n\r\n"
)


def exchange(client: Client, reply: str) -> tuple[bytes, StreamingRequest]:
    """Return what a server gets that answers with `reply`, and the connection with the answer."""
    got = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        length = int(bytes(got).lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        got.extend(await reader.readexactly(length))
        cut = reply.rindex("\r\n\r\ndata") + 3  # within a line end
        for piece in (reply[:cut], reply[cut:]):
            writer.write(piece.encode())
            await writer.drain()
        writer.close()

    async def work() -> StreamingRequest:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client._port = server.sockets[0].getsockname()[1]
            connection = client.connection(Job(prompt="1 2", max_tokens=9), clock())
            await client.send(connection)
            await asyncio.wait_for(connection.ended.wait(), 60)
            return connection

    connection = asyncio.run(work())
    return bytes(got), connection


def test_a_chat_goes_below_the_servers_path_with_its_key_and_may_end_early() -> None:
    client = Client("http://127.0.0.1:1/openai/v1", "m", key="k", chat=True, exact=False)
    got, connection = exchange(client, CHAT)
    timeline = connection.timeline()
    assert (timeline.error, timeline.tokens, len(timeline.times)) == (None, 2, 2)
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /openai/v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in head
    sent = json.loads(body)
    assert sent["messages"] == [{"role": "user", "content": "1 2"}]
    assert "ignore_eos" not in sent and "prompt" not in sent


def test_an_answer_that_ends_early_is_an_error_unless_it_may() -> None:
    client = Client("http://127.0.0.1:1", "m", chat=True)
    _, connection = exchange(client, CHAT)
    assert connection.timeline().error == "0 tokens came, 9 were asked for"


@pytest.mark.parametrize(
    ("url", "port", "tls"),
    [("http://h", 80, False), ("https://h", 443, True), ("https://h:8443/v1", 8443, True)],
)
def test_https_is_spoken_where_the_url_says_so(url: str, port: int, tls: bool) -> None:
    client = Client(url, "m")
    assert (client._port, client._tls is not None) == (port, tls)


@pytest.mark.parametrize("url", ["h:1", "http://", "http://h:x", "http://h:0", "http://u@h", "http://h/?a=1"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be a server's URL"):
        base_url(url)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchmarkError, match=r"cannot reach http://127\.0\.0\.1:9 .*check the URL"):
        model_of("http://127.0.0.1:9")
