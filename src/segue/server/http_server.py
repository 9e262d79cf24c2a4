"""The HTTP server that the engine's server and the router share: connections with limits, and signals."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from segue.listener import BACKLOG
from segue.server.connection import Connection
from segue.server.connections import ConnectionLimits, Connections
from segue.server.handshakes import ACCEPTED_AT_ONCE, Handshakes
from segue.server.request_ids import marked

GRACE_S = 1  # time for replies to end when uvicorn shuts down
CLOSING_S = 0.5  # for clients that speak TLS to agree to the end of a connection, when uvicorn shuts down


async def first_of(*ends: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of ``ends`` is done, or for ``timeout`` seconds; nothing is cancelled or raised."""
    await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Returns the events that signals set: to end the server, and to do so without waiting for requests."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set() or number == signal.SIGINT:
            at_once.set()
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, on_signal, each)
    return stop, at_once


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller, and whose connections have limits."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        log_level: str,
        *,
        tls: ssl.SSLContext | None = None,
        root_path: str | None = None,
    ) -> None:
        """Make a server for ``app``; each request is logged only at the level "debug".

        Args:
            app: answers requests.
            limits: of its connections.
            log_level: of uvicorn's own lines.
            tls: how it speaks TLS; None: it speaks plain HTTP.
            root_path: is removed from the paths of requests that begin with it.
        """
        config = uvicorn.Config(
            marked(app),
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=math.ceil(limits.idle_s),
            server_header=False,
        )
        super().__init__(config)
        self._connections = Connections(limits)
        self._tls = tls
        self._root_path = (root_path or "").encode()
        self._accepting: set[asyncio.Task[None]] = set()
        self.accepts = asyncio.Event()  # set once clients are accepted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept clients with :class:`Connection` as their protocol."""
        await super().startup(sockets=[])  # uvicorn's own would make connections without limits
        loop = asyncio.get_running_loop()
        for listener in sockets or []:
            if self._tls is not None:
                handshakes: Any = Handshakes(listener, self._tls, self._connections, self._protocol)
                self.servers.append(handshakes)
                continue
            accept = partial(self._accept_more, listener)
            create: Any = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
            self.servers.append(await create(accept, sock=listener, backlog=BACKLOG))
        self.accepts.set()

    async def on_tick(self, counter: int) -> bool:
        """Check the connections; uvicorn calls this every 0.1 s."""
        self._connections.tick(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections; those that wait for the client's end of TLS are not waited for."""
        if self._tls is not None:
            asyncio.get_running_loop().call_later(CLOSING_S, self._connections.abort_closing)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, where uvicorn would handle SIGINT and SIGTERM: :func:`serve` does."""
        yield

    def _accept_more(self, listener: socket.socket) -> Connection:
        """Returns the protocol of the client just accepted, after accepting those who wait behind it.

        The event loop calls it, in place of a plain factory of protocols, once per client that it accepts.
        uvloop accepts one per turn: where many requests are answered in a turn of 0.2 s, a health check
        behind 1,000 new connections would wait for minutes.
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
            root_path=self._root_path,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
