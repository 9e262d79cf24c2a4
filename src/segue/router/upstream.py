"""HTTP connections to one worker, or to another process of the router, kept open and used again.

It is written on ``httptools`` because aiohttp misses the bar of 30,000 events per second per process: a relay
of server-sent events, one event per read, takes 24 to 30 µs of CPU time per event with this module and 48 to
50 µs with aiohttp 3.14, uvicorn's part of both included. As frames of legs, whose tokens are kept, events
take 28 to 30 µs where they took 25 to 26 µs raw (64 streams, two cores that other work kept busy). The
latency that the relay adds at 3,200 events per second was 1.0 to 1.6 ms and 2.0 to 3.4 ms at the median, on
the same two cores.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from functools import cache
from urllib.parse import urlsplit

from segue.router.breaker import LegEnd
from segue.router.deadline import within
from segue.router.upstream_connection import Headers, UpstreamConnection, UpstreamError

CONNECT_S = 2.0  # to open a connection
MOST_IDLE = 256  # connections that are kept open without a request


@cache
def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Returns how to speak TLS with servers whose certificates a file vouches for; None: the system's.

    Raises:
        OSError: the file cannot be read, or has no certificates.
    """
    return ssl.create_default_context(cafile=ca_file)


class Upstream:
    """The connections to one worker."""

    def __init__(self, url: str, ca_file: str | None = None, address: bytes | None = None) -> None:
        """Open nothing yet.

        Args:
            url: of the server.
            ca_file: certificates to trust at an HTTPS URL, None: the system's.
            address: of the Unix socket where the server is; None: it is where its URL says.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._tls = tls_context(ca_file) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._authority = parts.netloc.encode()
        self._address = address
        self._idle: list[UpstreamConnection] = []
        self._all: set[UpstreamConnection] = set()

    async def request(
        self, method: bytes, path: bytes, headers: Headers, body: bytes, host: bytes | None = None
    ) -> UpstreamConnection:
        """Send a request; returns its connection once the reply's head is there.

        ``host`` is the value of its header Host; None: the server's own address.

        The caller gives the connection back by :meth:`done`, whatever happens. A connection that was open
        before may have been closed by the worker meanwhile: then the request is sent on a new one.

        Raises:
            UpstreamError: the worker cannot be reached, or closed the connection.
        """
        fields = b"".join(b"%b: %b\r\n" % header for header in headers)
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n"
        message = head % (method, path, host or self._authority, fields, len(body)) + body
        while True:
            was_open = bool(self._idle)
            connection = self._idle.pop() if was_open else await self._open()
            is_taken = False  # by the caller; not if this task is cancelled as the head arrives
            try:
                connection.send(message)
                await connection.head()
                is_taken = True
                return connection
            except UpstreamError as error:
                if not was_open or connection.has_received or error.end != "cut":
                    raise
            finally:
                if not is_taken:
                    self.done(connection)

    def done(self, connection: UpstreamConnection) -> None:
        """Take a connection back: it is kept if its reply is complete, else closed."""
        if connection.is_reusable and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort("client_left", "nobody reads the reply any more")

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that has ended."""
        self._all.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    def abort_all(self, end: LegEnd, text: str, spared: UpstreamConnection | None = None) -> None:
        """Close every connection but one; whoever waits for a reply gets an UpstreamError."""
        for connection in self._all - {spared}:
            connection.abort(end, text)

    async def _open(self) -> UpstreamConnection:
        connection, is_open = UpstreamConnection(self), False
        try:
            await within(CONNECT_S, self._connect(connection))
            is_open = True
        except TimeoutError:
            raise UpstreamError("connect", f"no connection within {CONNECT_S:g} s") from None
        except ssl.SSLCertVerificationError as error:
            text = f"its certificate is not trusted ({error.verify_message}); give one that is by --worker-ca"
            raise UpstreamError("connect", text) from None
        except OSError as error:
            raise UpstreamError("connect", f"no connection ({error.strerror or error})") from None
        finally:
            if not is_open:
                connection.abort("client_left", "nobody waits for the connection any more")
        if not connection.has_ended:
            self._all.add(connection)
        return connection

    async def _connect(self, connection: UpstreamConnection) -> None:
        loop = asyncio.get_running_loop()
        if self._address is None:
            await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
            return
        end = socket.socket(socket.AF_UNIX)
        try:
            end.setblocking(False)
            end.connect(self._address)  # at once; uvloop itself takes no abstract address
            await loop.create_unix_connection(lambda: connection, sock=end)
        except OSError:
            end.close()
            raise
