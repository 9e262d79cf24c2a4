"""Workers that are small servers in the test's own event loop, and a real router in front of them."""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
import msgspec
import pytest

from segue.listener import bind, listen, url_of
from segue.messages.fleet import REPORT_PERIOD_S, Role, WorkerRecord
from segue.messages.leg import LEG_CONTENT, LEG_PATH, Data, End, Frame, Leg, LegFailed, LegOutput, pack_frame
from segue.router.app import create_router_app
from segue.router.config import RouterConfig
from segue.router.registry import Registry
from segue.router.router import Router
from segue.server.connections import ConnectionLimits
from segue.server.http_server import HttpServer
from segue.server.responses import encode
from tests.router.workers import record, report
from tests.support.ports import free_port

DEADLINE_S = 60.0
STREAM = {"text": "Hello", "stream": True}  # a request; a fake worker takes it on every route
REPLY = b'{"text": "hello", "meta_info": {"prompt_tokens": 10}}'


def run(test: Coroutine[Any, Any, None]) -> None:
    """Runs an asynchronous test to its end."""
    asyncio.run(asyncio.wait_for(test, 100))


async def until(is_so: Callable[[], object], what: str) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(0.002)


@dataclass(eq=False)
class Exchange:
    """One request to a fake worker, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the router closed the connection
    num_sent: int = 0  # tokens that frames have named

    @property
    def is_leg(self) -> bool:
        return self.path == LEG_PATH

    @cached_property
    def leg(self) -> Leg:
        return msgspec.msgpack.decode(self.body, type=Leg)

    @property
    def given(self) -> list[int]:
        """The tokens of the first prompt that the leg says the client has."""
        return [token for output in self.leg.outputs if output.index == 0 for token in array("i", output.ids)]

    async def whole(self, body: bytes = REPLY, status: int = 200, kind: str = "application/json") -> None:
        """Answers with a whole reply; a leg that went well in its last frame."""
        if self.is_leg and status == 200:
            self.begin()
            self.end(body)
            await self.writer.drain()
            return
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    def begin(self, kind: str = LEG_CONTENT) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())

    def send_chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send(self, payload: bytes) -> None:
        """Sends a frame with the next token: 1, 2, …, behind those that the client has."""
        self.num_sent += 1
        token = array("i", [len(self.given) + self.num_sent]).tobytes()
        self.send_frame(Data(payload, [LegOutput(0, token)]))

    def send_frame(self, frame: Frame) -> None:
        self.send_chunk(pack_frame(frame))

    def end(self, payload: bytes = b"") -> None:
        self.send_frame(End(payload))
        self.close_body()

    def fail(self, code: str, status: int = 503, payload: bytes = b"failed", retryable: bool = True) -> None:
        self.send_frame(LegFailed(status, code, retryable, payload))
        self.close_body()

    def close_body(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    async def hang_up(self) -> None:
        """Closes the connection; all that was sent before arrives."""
        await self.writer.drain()
        self.writer.close()
        await self.gone.wait()

    def cut(self) -> None:
        self.writer.transport.abort()


Answer = Callable[[Exchange], Awaitable[None]]


async def say_hello(exchange: Exchange) -> None:
    await exchange.whole()


class FakeWorker:
    """A worker: it reports, and answers requests as the test says."""

    def __init__(self, answer: Answer = say_hello, **of_record: Any) -> None:
        self.answer = answer
        self.report = report()
        # Two of them are two engines, unless a test says that they are one process.
        of_record.setdefault("incarnation", secrets.token_hex(8))
        self.record: WorkerRecord = record("fake", **of_record)
        self.named: Role | None = None  # the role that the router's options say it has
        self.exchanges: list[Exchange] = []
        self.watchers: list[Exchange] = []
        self.watch_status = 200
        self.is_silent = False
        self.num_connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def id(self) -> str:
        return self.url.partition("://")[2]

    async def start(self, port: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Listen, by default at a port that nobody is given while the worker is dead."""
        port = free_port() if port is None else port
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=tls)
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def refuse_connections(self) -> None:
        """Closes the port; open connections stay."""
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)

    async def die(self) -> None:
        await self.refuse_connections()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while True:
                    await self._answer_one(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        exchange = Exchange(method, path, headers, body, reader, writer)
        if path == "/watch":
            await self._watch(exchange)
            return
        if path != "/health":  # which routers ask foreign servers for at any time
            self.exchanges.append(exchange)
        answering = asyncio.ensure_future(self.answer(exchange))
        leaving = asyncio.ensure_future(_wait_for_end(exchange))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            elif exchange.gone.is_set():
                raise ConnectionError
        finally:
            if reader.at_eof() or reader.exception() is not None:
                exchange.gone.set()
            for each in (answering, leaving):
                each.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _watch(self, exchange: Exchange) -> None:
        if self.watch_status != 200:
            await exchange.whole(b"{}", self.watch_status)
            return
        self.watchers.append(exchange)
        exchange.begin("application/x-ndjson")
        exchange.send_chunk(encode(self.record) + b"\n")
        while not exchange.writer.is_closing():
            if not self.is_silent:
                exchange.send_chunk(encode(self.report) + b"\n")
                await exchange.writer.drain()
            await asyncio.sleep(REPORT_PERIOD_S / 5)
        raise ConnectionError


async def _wait_for_end(exchange: Exchange) -> None:
    """Notes that the router has closed the connection: it sends nothing before the reply has ended."""
    while not exchange.reader.at_eof():
        if exchange.reader.exception() is not None:
            break
        await asyncio.sleep(0.002)
    exchange.gone.set()


@dataclass(eq=False)
class RunningRouter:
    """A router on a real socket."""

    url: str
    router: Router
    server: HttpServer
    http: httpx.AsyncClient

    @property
    def registry(self) -> Registry:
        return self.router.registry

    def serves(self, worker: FakeWorker) -> bool:
        entry = self.registry.get(worker.id)
        return entry is not None and entry.why_not(time.monotonic()) is None

    def reason(self, worker: FakeWorker) -> str:
        entry = self.registry.get(worker.id)
        assert entry is not None
        return entry.why_not(time.monotonic()) or ""

    async def generate(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/generate", json={"text": "Hello"} | fields)


@asynccontextmanager
async def routed(*workers: FakeWorker, waits: bool = True, **options: Any) -> AsyncIterator[RunningRouter]:
    """Runs a router in front of workers; at the end it must hold nothing."""
    for worker in workers:
        if not worker.url:
            await worker.start()
    config = RouterConfig(port=0, log_level="error", **options)
    app = create_router_app(config)
    router: Router = app.state.router
    listener = bind(config.host, config.port)
    listen(listener)
    server = HttpServer(app, ConnectionLimits.of_this_process(config.max_body_mib), config.log_level)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    key = options.get("api_key")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    client = httpx.AsyncClient(base_url=url_of(listener), timeout=DEADLINE_S, headers=headers, verify=False)
    running = RunningRouter(url_of(listener), router, server, client)
    await until(lambda: server.started, "the router listens")
    for worker in workers:
        router.add(worker.url, worker.named)
    try:
        if waits:
            for worker in workers:
                await until(lambda worker=worker: running.serves(worker), f"{worker.id} serves")
        yield running
        await until(lambda: running.registry.num_requests() == 0, "every hold is released")
    finally:
        await client.aclose()
        await router.close()
        await stop(server, serving)
        for worker in workers:
            await worker.die()


async def stop(server: HttpServer, serving: asyncio.Task[None]) -> None:
    """Ends a server whose clients have left, without the 0.2 s that uvicorn takes for a shutdown."""
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    for listening in server.servers:
        listening.close()
    await until(lambda: not server.server_state.connections, "every connection to the router is closed")


def overloaded() -> bytes:
    return native_error(503, "overloaded")


def native_error(status: int, code: str | None) -> bytes:
    content = {"object": "error", "message": "full", "type": "a_type", "code": status, "error_code": code}
    return json.dumps(content).encode()
