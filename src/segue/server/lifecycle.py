"""Runs the server process: listen, load the model, serve, drain and stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from segue.config import EngineConfig
from segue.host import freeze_heap
from segue.launch.processes import WORKER_COMMAND
from segue.launch.runtime import Runtime
from segue.listener import listen, url_of
from segue.logs import logger
from segue.server.app import create_app
from segue.server.connections import ConnectionLimits, raise_descriptor_limit
from segue.server.http_server import HttpServer, first_of, on_signals
from segue.server.registration import keep_registered

POLL_S = 0.02  # between two looks whether the running requests have ended


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
    stop, at_once = on_signals()
    http = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(Runtime.start(config, command=command))
    stopping = asyncio.create_task(stop.wait())
    runtime: Runtime | None = None
    registering: asyncio.Task[None] | None = None
    try:
        await first_of(starting, stopping, http)
        if not starting.done():
            return 0 if stop.is_set() else 1
        runtime = app.state.runtime = starting.result()
        freeze_heap()  # what the start has made stays until the end
        on_ready(runtime, url_of(listener))
        registering = asyncio.create_task(keep_registered(config, url_of(listener)))
        await first_of(stopping, http, runtime.died)
        if runtime.died.done():
            text = "the engine is dead; /health answers 503 for %g s, then the server ends"
            logger.error(text, config.exit_grace)
            await first_of(stopping, http, timeout=config.exit_grace)
        elif stopping.done():
            await _drain(runtime, server, config.drain_s, lambda: at_once.is_set() or http.done())
        return 0 if stopping.done() and not runtime.died.done() else 1
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if registering is not None:
            registering.cancel()
            await asyncio.gather(registering, return_exceptions=True)
        if runtime is not None:
            await runtime.shutdown()
        server.should_exit = True
        await http


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
