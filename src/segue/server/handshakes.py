"""Accepts clients that speak TLS, with a bound on those whose handshake is not complete."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial

from segue.listener import BACKLOG
from segue.logs import logger
from segue.server.connection import Connection
from segue.server.connections import Connections

ACCEPTED_AT_ONCE = 128  # per turn of the event loop
RETRY_S = 0.1  # after accepting has failed, for want of descriptors


class Handshakes:
    """Takes the place of the event loop's own server for one listener.

    A client has no :class:`Connection` until its handshake is complete, so the limits of connections do not
    see it. It has as long as for the head of a request. Where no descriptor is left for a new client, the
    handshake that has taken longest is ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        connections: Connections,
        make: Callable[[], Connection],
    ) -> None:
        """Begin to accept; ``make`` makes the protocol of a client, ``connections`` has the open ones."""
        self._listener = listener
        self._tls = tls
        self._connections = connections
        self._make = make
        self._pending: dict[asyncio.Task[None], None] = {}  # the longest first
        listener.listen(BACKLOG)  # as the event loop's own server does
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept nobody any more, and end all handshakes."""
        self._accepting.cancel()
        for task in self._pending:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended, after :meth:`close`."""
        await asyncio.gather(self._accepting, *self._pending, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
                self._begin(client)
                for _ in range(ACCEPTED_AT_ONCE - 1):
                    self._begin(self._listener.accept()[0])
            except BlockingIOError:  # none waits any more
                continue
            except OSError as error:
                logger.warning("clients cannot be accepted: %s", error)
                await asyncio.sleep(RETRY_S)

    def _begin(self, client: socket.socket) -> None:
        """Begin the handshake with a client that was accepted."""
        limits = self._connections.limits
        most = limits.max_connections + limits.spare_connections
        if self._pending and len(self._pending) + self._connections.num_open >= most:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._connect(client))
        self._pending[task] = None
        task.add_done_callback(partial(self._end, client))

    def _end(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        """Forget a handshake that has ended."""
        self._pending.pop(task, None)
        if task.cancelled():  # perhaps before it had begun
            client.close()

    async def _connect(self, client: socket.socket) -> None:
        limits = self._connections.limits
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                client,
                ssl=self._tls,
                ssl_handshake_timeout=limits.head_s,
                ssl_shutdown_timeout=limits.reply_silence_s,
            )
        except OSError as error:  # the client is gone, or does not speak TLS as the server does
            logger.debug("a TLS handshake has failed: %s", error)
            client.close()
