"""Runs the server process: listen, load the model, serve, drain and stop."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from segue.config import EngineConfig
from segue.host import freeze_heap
from segue.launch.processes import WORKER_COMMAND
from segue.launch.runtime import Runtime
from segue.listener import BACKLOG, listen, url_of
from segue.logs import logger
from segue.server.app import create_app
from segue.server.connection import Connection
from segue.server.connections import ConnectionLimits, Connections, raise_descriptor_limit

POLL_S = 0.02  # between two looks whether the running requests have ended
GRACE_S = 1  # time for replies to end when uvicorn shuts down
# Connections accepted per turn of the event loop. uvloop accepts one per turn: where many requests are
# answered in a turn of 0.2 s, a health check behind 1,000 new connections would wait for minutes.
ACCEPTED_AT_ONCE = 128


async def serve(
    config: EngineConfig,
    listener: socket.socket,
    on_ready: Callable[[Runtime, str], None],
    command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Serve until a signal or the engine's death; returns the exit code: 0 only after a signal.

    ``on_ready`` is called with the engine and the server's URL, and ``command`` starts a worker process.

    While the model loads, requests are answered 503. SIGTERM first lets running requests end, for at most
    ``--drain-s`` seconds; SIGINT and any second signal abort them at once. The soft limit of open files is
    raised for this process and its workers.

    Raises:
        SegueError: the port was taken meanwhile, or the engine cannot start.
    """
    listen(listener)
    raise_descriptor_limit()
    app = create_app(config)
    server = HttpServer(app, ConnectionLimits.of_this_process(config.max_body_mib), config.log_level)
    stop, at_once = _on_signals()
    http = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(Runtime.start(config, command=command))
    stopping = asyncio.create_task(stop.wait())
    runtime: Runtime | None = None
    try:
        await _first_of(starting, stopping, http)
        if not starting.done():
            return 0 if stop.is_set() else 1
        runtime = app.state.runtime = starting.result()
        freeze_heap()  # what the start has made stays until the end
        on_ready(runtime, url_of(listener))
        await _first_of(stopping, http, runtime.died)
        if runtime.died.done():
            text = "the engine is dead; /health answers 503 for %g s, then the server ends"
            logger.error(text, config.exit_grace)
            await _first_of(stopping, http, timeout=config.exit_grace)
        elif stopping.done():
            await _drain(runtime, server, config.drain_s, lambda: at_once.is_set() or http.done())
        return 0 if stopping.done() and not runtime.died.done() else 1
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if runtime is not None:
            await runtime.shutdown()
        server.should_exit = True
        await http


async def _first_of(*ends: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of ``ends`` is done, or for ``timeout`` seconds; nothing is cancelled or raised."""
    await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Returns the events that signals set: to end the server, and to do so without waiting for requests."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set() or number == signal.SIGINT:
            at_once.set()
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, on_signal, each)
    return stop, at_once


async def _drain(runtime: Runtime, server: HttpServer, seconds: float, is_over: Callable[[], bool]) -> None:
    """Refuse new requests; return when the running ones have ended, or must be aborted.

    They must be aborted after ``seconds``, or as soon as ``is_over`` says that there is no more time.
    """
    manager = runtime.manager
    runtime.drain()
    for connection in list(server.server_state.connections):
        connection.shutdown()  # closes an idle connection now, others after their reply
    if manager.num_requests and seconds and not is_over():
        text = "%d requests have %g s to end; another signal ends them at once"
        logger.info(text, manager.num_requests, seconds)
    deadline = asyncio.get_running_loop().time() + seconds
    while manager.num_requests or server.server_state.tasks:  # in flight, or their replies not yet written
        if is_over() or runtime.died.done() or asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.sleep(POLL_S)


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller, and whose connections have limits."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, log_level: str) -> None:
        """Make a server for ``app``; each request is logged only at the level "debug"."""
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level=log_level,
            access_log=log_level == "debug",
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=math.ceil(limits.idle_s),
            server_header=False,
        )
        super().__init__(config)
        self._connections = Connections(limits)
        self._accepting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept clients with :class:`Connection` as their protocol."""
        await super().startup(sockets=[])  # uvicorn's own would make connections without limits
        loop = asyncio.get_running_loop()
        for listener in sockets or []:
            accept = partial(self._accept_more, listener)
            self.servers.append(await loop.create_server(accept, sock=listener, backlog=BACKLOG))

    async def on_tick(self, counter: int) -> bool:
        """Check the connections; uvicorn calls this every 0.1 s."""
        self._connections.tick(time.monotonic())
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, where uvicorn would handle SIGINT and SIGTERM: :func:`serve` does."""
        yield

    def _accept_more(self, listener: socket.socket) -> Connection:
        """Returns the protocol of the client just accepted, after accepting those who wait behind it.

        The event loop calls it, in place of a plain factory of protocols, once per client that it accepts.
        """
        for _ in range(ACCEPTED_AT_ONCE - 1):
            try:
                client, _ = listener.accept()
            except OSError:  # none waits, or its client is gone; the event loop handles a lack of descriptors
                break
            task = asyncio.create_task(self._connect(client))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
        return self._protocol()

    async def _connect(self, client: socket.socket) -> None:
        """Give an accepted client its protocol."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, client)
        except OSError:  # the client is gone already
            client.close()

    def _protocol(self) -> Connection:
        """Make the protocol of one client, with the arguments that uvicorn would give to its own."""
        return Connection(
            connections=self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
