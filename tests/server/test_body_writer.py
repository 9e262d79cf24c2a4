"""Parts of a reply that are written past ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from segue.listener import bind, listen
from segue.server.body_writer import BodyWriter, offered
from segue.server.connections import ConnectionLimits
from segue.server.http_server import HttpServer
from tests.router.fake_servers import run, stop, until

PART = b"part"
Work = Callable[[BodyWriter, Send], Awaitable[None]]
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def begin(send: Send, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})


async def end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def served(work: Work, client: Client, version: str = "1.1") -> None:
    """Lets a server do ``work`` for the one request of a client."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        writer = offered(scope)
        assert writer is not None
        await work(writer, send)
        is_done.set()

    async def test() -> None:
        listener = bind("127.0.0.1", 0)
        listen(listener)
        server = HttpServer(app, ConnectionLimits.of_this_process(16), "error")
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started, "the server listens")
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(f"GET / HTTP/{version}\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        await client(reader, writer)
        await asyncio.wait_for(is_done.wait(), 60)
        writer.transport.abort()
        await stop(server, serving)

    is_done = asyncio.Event()
    run(test())


def ends_with(body: bytes) -> Client:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.read()).partition(b"\r\n\r\n")[2] == body

    return client


async def read_the_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"first\r\n")


def test_a_part_is_a_chunk_in_the_order_of_sending() -> None:
    async def work(writer: BodyWriter, send: Send) -> None:
        await begin(send)
        assert writer.write(PART)
        await send({"type": "http.response.body", "body": b"third", "more_body": True})
        assert writer.write(PART)
        await end(send)

    served(work, ends_with(b"5\r\nfirst\r\n4\r\npart\r\n5\r\nthird\r\n4\r\npart\r\n0\r\n\r\n"))


def test_nothing_is_written_before_the_reply_begins_and_behind_its_end() -> None:
    async def work(writer: BodyWriter, send: Send) -> None:
        assert not writer.write(PART)
        await begin(send)
        await end(send)
        assert not writer.write(PART)

    served(work, ends_with(b"5\r\nfirst\r\n0\r\n\r\n"))


def test_a_reply_without_chunks_is_left_to_asgi() -> None:
    async def work(writer: BodyWriter, send: Send) -> None:
        await begin(send)
        assert not writer.write(PART)
        await end(send)

    served(work, ends_with(b"first"), version="1.0")


def test_a_reply_of_known_length_is_left_to_asgi() -> None:
    async def work(writer: BodyWriter, send: Send) -> None:
        await begin(send, (b"content-length", b"5"))
        assert not writer.write(PART)
        await end(send)

    served(work, ends_with(b"first"))


def test_a_slow_client_is_left_to_asgi_which_waits_for_it() -> None:
    async def work(writer: BodyWriter, send: Send) -> None:
        await begin(send)

        async def until_refused() -> None:
            while writer.write(bytes(1 << 16)):
                await asyncio.sleep(0)

        await asyncio.wait_for(until_refused(), 60)

    served(work, read_the_head)


def test_nothing_is_written_for_a_client_that_has_left() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_the_head(reader, writer)
        writer.transport.abort()

    async def work(writer: BodyWriter, send: Send) -> None:
        await begin(send)
        await until(lambda: not writer.write(PART), "the server knows that the client has left")

    served(work, leave)


def test_a_server_without_the_extension_offers_no_writer() -> None:
    assert offered({"type": "http"}) is None
    assert offered({"type": "http", "extensions": {"http.response.debug": {}}}) is None
