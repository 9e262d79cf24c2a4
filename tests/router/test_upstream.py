"""Connections to a worker."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from segue.router.upstream import Upstream
from segue.router.upstream_connection import HIGH_BYTES, UpstreamConnection, UpstreamError
from tests.router.fake_servers import REPLY, Exchange, FakeWorker, run, until


async def ask(upstream: Upstream) -> bytes:
    connection = await upstream.request(b"POST", b"/generate", [], b"{}")
    try:
        return b"".join([part async for part in _parts(connection)])
    finally:
        upstream.done(connection)


async def _parts(connection):  # type: ignore[no-untyped-def]
    while data := await connection.read():
        yield data


def test_a_body_in_many_chunks_is_read_whole() -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for _ in range(100):
                exchange.send_chunk(b"x" * HIGH_BYTES)
                await exchange.writer.drain()
            exchange.close_body()

        worker = FakeWorker(answer)
        await worker.start()
        assert len(await ask(Upstream(worker.url))) == 100 * HIGH_BYTES
        await worker.die()

    run(test())


def test_a_connection_that_the_worker_has_closed_is_replaced() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        upstream = Upstream(worker.url)
        assert await ask(upstream) == REPLY
        worker.exchanges[0].cut()  # at the same time as the next request is sent
        assert await ask(upstream) == REPLY
        assert worker.num_connections == 2
        await worker.die()

    run(test())


def test_a_connection_that_ends_before_its_first_request_is_an_error() -> None:
    """A worker that dies leaves connections that its kernel had accepted."""

    async def test() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        upstream = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}")
        connection = await upstream._open()
        listener.close()
        await until(lambda: connection.has_ended, "the connection is reset")
        with pytest.raises(UpstreamError) as caught:
            connection.send(b"GET / HTTP/1.1\r\n\r\n")
        assert caught.value.end == "cut"

    uvloop.run(test())  # as a router's: it refuses writes to a closed connection


def test_nobody_there_is_told_as_such() -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start()
        await worker.die()
        with pytest.raises(UpstreamError, match="no connection") as caught:
            await ask(Upstream(worker.url))
        assert caught.value.end == "connect"

    run(test())


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-server\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"]
)
def test_a_reply_that_is_not_http_or_not_whole_is_an_error(data: bytes) -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.writer.write(data)
            await exchange.writer.drain()
            exchange.writer.close()

        worker = FakeWorker(answer)
        await worker.start()
        with pytest.raises(UpstreamError) as caught:
            await ask(Upstream(worker.url))
        assert caught.value.end == "cut"
        await worker.die()

    run(test())


def test_all_requests_of_a_worker_can_be_ended() -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            upstream.abort_all("timeout", "it hangs")
            await exchange.gone.wait()

        worker = FakeWorker(answer)
        await worker.start()
        upstream = Upstream(worker.url)
        with pytest.raises(UpstreamError, match="it hangs") as caught:
            await asyncio.wait_for(ask(upstream), 60)
        assert caught.value.end == "timeout"
        await worker.die()

    run(test())


def test_a_body_can_be_taken_as_it_arrives_until_its_taker_has_enough() -> None:
    async def test() -> None:
        taken: list[bytes] = []
        has_enough = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for number in range(3):
                exchange.send_chunk(b"%d" % number)
                await until(lambda number=number: len(taken) > number, "the chunk was taken")
            await has_enough.wait()
            exchange.send_chunk(b"rest")
            exchange.close_body()

        def take(data: bytes) -> bool:
            taken.append(data)
            return len(taken) < 3

        worker = FakeWorker(answer)
        await worker.start()
        connection = await Upstream(worker.url).request(b"POST", b"/generate", [], b"{}")
        await connection.read_by(take)
        assert taken == [b"0", b"1", b"2"]
        has_enough.set()
        assert await connection.read() == b"rest" and len(taken) == 3
        await worker.die()

    run(test())


def test_what_has_arrived_before_is_taken_first() -> None:
    async def test() -> None:
        taken: list[bytes] = []

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send_chunk(b"before")
            await until(lambda: connection is not None and connection._parts, "it has arrived")
            exchange.close_body()
            go_on.set()
            await exchange.gone.wait()

        def take(data: bytes) -> bool:
            taken.append(data)
            return True

        connection: UpstreamConnection | None = None
        go_on = asyncio.Event()
        worker = FakeWorker(answer)
        await worker.start()
        connection = await Upstream(worker.url).request(b"POST", b"/generate", [], b"{}")
        await go_on.wait()
        await asyncio.wait_for(connection.read_by(take), 60)  # returns at the end of the body
        assert taken == [b"before"] and connection.is_complete
        connection.abort("client_left", "the test ends")
        await worker.die()

    run(test())


def test_taking_a_body_that_is_cut_is_an_error() -> None:
    async def test() -> None:
        taken: list[bytes] = []

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send_chunk(b"part")
            await until(lambda: taken, "the part was taken")
            exchange.cut()

        def take(data: bytes) -> bool:
            taken.append(data)
            return True

        worker = FakeWorker(answer)
        await worker.start()
        connection = await Upstream(worker.url).request(b"POST", b"/generate", [], b"{}")
        with pytest.raises(UpstreamError) as caught:
            await asyncio.wait_for(connection.read_by(take), 60)
        assert caught.value.end == "cut"
        await worker.die()

    run(test())


def test_a_client_that_leaves_as_the_head_arrives_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task is cancelled when the head is there, and before it goes on with it."""
    on_headers_complete = UpstreamConnection.on_headers_complete

    def then_leave(connection: UpstreamConnection) -> None:
        on_headers_complete(connection)
        asking.cancel()

    monkeypatch.setattr(UpstreamConnection, "on_headers_complete", then_leave)

    async def test() -> None:
        nonlocal asking

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            await exchange.gone.wait()

        worker = FakeWorker(answer)
        await worker.start()
        asking = asyncio.ensure_future(Upstream(worker.url).request(b"POST", b"/generate", [], b"{}"))
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: worker.exchanges[0].gone.is_set(), "the connection is closed")
        await worker.die()

    asking: asyncio.Future[UpstreamConnection]
    run(test())
