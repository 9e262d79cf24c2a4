"""Runs the server process: bind the port, load the model, serve, drain and stop."""

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
from starlette.applications import Starlette

from segue.config import EngineConfig
from segue.host import freeze_heap
from segue.launch.processes import WORKER_COMMAND
from segue.launch.runtime import Runtime
from segue.listener import BACKLOG, listen, url_of
from segue.logs import logger
from segue.server.app import create_app
from segue.server.backlog import Backlog
from segue.server.connection import Connection
from segue.server.connection_limits import ConnectionLimits, raise_descriptor_limit
from segue.server.connections import Connections

GRACE_S = 1  # time for replies to end when uvicorn shuts down
POLL_S = 0.02


async def serve(
    config: EngineConfig,
    listener: socket.socket,
    on_ready: Callable[[Runtime, str], None],
    command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    While the model loads, requests are answered 503. SIGTERM first lets running requests end, for at most
    ``--drain-s`` seconds; SIGINT and any second signal abort them at once. The soft limit of open files is
    raised for this process and its workers.

    Raises:
        SegueError: the port was taken meanwhile, or the engine cannot start.
    """
    listen(listener)
    raise_descriptor_limit()
    app = create_app(config)
    server = make_server(app, config)
    signals = _Signals()
    http = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(Runtime.start(config, command=command))
    stopping = asyncio.create_task(signals.stop.wait())
    runtime: Runtime | None = None
    try:
        await asyncio.wait({starting, stopping, http}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0 if signals.stop.is_set() else 1
        runtime = app.state.service.runtime = starting.result()
        freeze_heap()
        on_ready(runtime, url_of(listener))
        code = await _serve_until_the_end(runtime, stopping, http, config.exit_grace)
        if stopping.done() and not runtime.died.done():
            await _drain(runtime, server, http, signals.at_once, config.drain_s)
        return 1 if runtime.died.done() else code
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if runtime is not None:
            await runtime.shutdown()
        server.should_exit = True
        await http


async def _serve_until_the_end(
    runtime: Runtime, stopping: asyncio.Task[bool], http: asyncio.Task[None], exit_grace: float
) -> int:
    ends: set[asyncio.Future[Any]] = {stopping, http, runtime.died}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not runtime.died.done():
        return 0 if stopping.done() else 1
    logger.error("the engine is dead; /health answers 503 for %g s, then the server ends", exit_grace)
    await asyncio.wait({stopping, http}, timeout=exit_grace, return_when=asyncio.FIRST_COMPLETED)
    return 1


class _Signals:
    """The effect of signals: ``stop`` ends the server, ``at_once`` skips waiting for running requests."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, self._on_signal, each)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stop.is_set() or number == signal.SIGINT:
            self.at_once.set()
        self.stop.set()


async def _drain(
    runtime: Runtime,
    server: uvicorn.Server,
    http: asyncio.Task[None],
    at_once: asyncio.Event,
    seconds: float,
) -> None:
    """Refuse new requests; return when the running ones have ended, or must be aborted."""
    runtime.drain()
    for connection in list(server.server_state.connections):
        connection.shutdown()  # closes an idle connection now, others after their reply
    if runtime.manager.num_requests and seconds and not at_once.is_set():
        logger.info(
            "%d requests have %g s to end; another signal ends them at once",
            runtime.manager.num_requests,
            seconds,
        )
    ends: list[asyncio.Future[Any]] = [
        asyncio.create_task(at_once.wait()),
        asyncio.create_task(_wait_idle(runtime, server)),
    ]
    await asyncio.wait([*ends, http, runtime.died], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in ends:
        each.cancel()


async def _wait_idle(runtime: Runtime, server: uvicorn.Server) -> None:
    """Return when no request is in flight and every reply is written."""
    while runtime.manager.num_requests or server.server_state.tasks:
        await asyncio.sleep(POLL_S)


def make_server(
    app: Starlette, config: EngineConfig, limits: ConnectionLimits | None = None
) -> uvicorn.Server:
    """Returns the HTTP server of an application; ``limits`` defaults to those of this process."""
    limits = limits or ConnectionLimits.of_this_process(config.max_body_mib)
    return _EngineServer(
        uvicorn.Config(
            app,
            log_config=None,
            log_level=config.log_level,
            access_log=config.log_level == "debug",
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=math.ceil(limits.idle_s),
            server_header=False,
        ),
        Connections(limits),
    )


class _EngineServer(uvicorn.Server):
    """A uvicorn server that leaves signals to :func:`serve` and checks the deadlines of its connections."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with :class:`Connection` as the protocol and :class:`Backlog` as its factory."""
        await super().startup(sockets=[])
        protocol = partial(
            Connection,
            connections=self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        for listener in sockets or []:
            first = Backlog(listener, protocol).first
            self.servers.append(await loop.create_server(first, sock=listener, backlog=BACKLOG))

    async def on_tick(self, counter: int) -> bool:
        """Check the connections; uvicorn calls this every 0.1 s."""
        self._connections.tick(time.monotonic())
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
