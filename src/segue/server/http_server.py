"""The HTTP server under any application: uvicorn's, with bounded connections that are checked regularly."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from segue.listener import BACKLOG
from segue.server.connection import Connection
from segue.server.connections import ConnectionLimits, Connections

GRACE_S = 1  # time for replies to end when uvicorn shuts down
# Connections accepted per turn of the event loop. uvloop accepts one per turn: where many requests are
# answered in a turn of 0.2 s, a health check behind 1,000 new connections would wait for minutes.
ACCEPTED_AT_ONCE = 128


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, log_level: str) -> None:
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
        await super().startup(sockets=[])
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
        yield

    def _accept_more(self, listener: socket.socket) -> Connection:
        """Returns the protocol of the client just accepted, after accepting those who wait behind it."""
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
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, client)
        except OSError:  # the client is gone already
            client.close()

    def _protocol(self) -> Connection:
        return Connection(
            connections=self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
