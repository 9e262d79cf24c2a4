"""Asks a child whether it is ready: over HTTP, or by connecting to its socket."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from segue.tls import unverified

ANSWER_S = 5.0  # for one answer
ANSWER_BYTES = 1 << 20  # the most of one


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessProbe:
    """When a child is ready: a GET of ``url`` is answered 200."""

    url: str  # on a route that needs no key; of an HTTPS one any certificate is taken
    min_serving: int = 0  # the least number under "serving" in the answer, which a router gives


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketProbe:
    """When a child is ready: it accepts connections at a unix socket that keeps the borders of messages."""

    path: str


async def is_ready(probe: ReadinessProbe | SocketProbe) -> bool:
    """Whether the child answers now that it is ready; whatever goes wrong means that it is not."""
    if isinstance(probe, SocketProbe):
        return _accepts(probe.path)
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await _get(probe.url)
        head, _, body = answer.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"200"]:
            return False
        return not probe.min_serving or json.loads(body)["serving"] >= probe.min_serving
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _accepts(path: str) -> bool:
    """Whether a process accepts connections at a unix socket. The kernel answers for it, at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(path)
        except OSError:
            return False
    return True


async def _get(url: str) -> bytes:
    """Return the bytes of an answer, head and body."""
    parts = urlsplit(url)
    tls = unverified() if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        # HTTP/1.0: the body has no chunks, and ends with the connection.
        writer.write(f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
        data = b""
        while len(data) < ANSWER_BYTES and (more := await reader.read(ANSWER_BYTES)):
            data += more
        return data
    finally:
        writer.close()
