"""Clients of streams on raw sockets: those that read their reply to its end, and those that leave before.

A reply that is read has to be complete: in chunks, the last of which is there, and behind ``[DONE]`` nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from tests.support.streams import ReplyInParts

REPLY_S = 180.0  # in which a reply has to be complete, its wait in the queue included
HALF_OPEN_S = 60.0  # in which a server has to close a connection whose client will send nothing more
MOST_SILENT_S = 15.0  # for which a client that never reads stays
DONE = b"data: [DONE]\n\n"
Leave = Literal["closes", "resets", "half-closes", "in its request", "before its reply", "never reads"]
LEAVES: tuple[Leave, ...] = get_args(Leave)
Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """A request for a stream."""

    path: str
    body: dict[str, Any]

    def encode(self) -> bytes:
        """Return the bytes of the request, which ask for the end of the connection behind the reply."""
        body = json.dumps(self.body | {"stream": True}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class BrokenReplyError(Exception):
    """A reply is not what its client may expect."""


def content_of(data: bytes, request: StreamRequest) -> Any:
    """Return what a stream says, however it was cut into parts.

    Raises:
        BrokenReplyError: the stream is not complete, or has an error.
    """
    head, _, rest = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise BrokenReplyError(f"{data[:300]!r} to {request}")
    text = dechunked(rest)
    if not text.endswith(DONE) or text.count(DONE) != 1:
        raise BrokenReplyError(f"the stream ends with {text[-100:]!r}")
    events = [
        msgspec.json.decode(part.removeprefix(b"data: "))
        for part in text.removesuffix(DONE).split(b"\n\n")
        if part.startswith(b"data: ")
    ]
    if not events or any("error" in event or event.get("object") == "error" for event in events):
        raise BrokenReplyError(f"{events[-1:]} to {request}")
    if request.path == "/generate":
        return _told(request, events)
    indices = {choice["index"] for event in events for choice in event["choices"]}
    return [_told(request, [_only(event, index) for event in events]) for index in sorted(indices)]


def _only(event: dict[str, Any], index: int) -> dict[str, Any]:
    """Return an event without the other choices."""
    return {**event, "choices": [choice for choice in event["choices"] if choice["index"] == index]}


def _told(request: StreamRequest, events: Iterable[Any]) -> Any:
    body = {**request.body, "stream": True}
    return ReplyInParts(request.path, body, 200, [(0.0, event) for event in events]).content()


def dechunked(data: bytes) -> bytes:
    """Return the content of a body in chunks.

    Raises:
        BrokenReplyError: its end is missing, or something follows it.
    """
    parts, at = [], 0
    while True:
        line, found, _ = data[at : at + 20].partition(b"\r\n")
        if not found:
            raise BrokenReplyError(f"the reply breaks off after {len(data)} bytes: {data[-60:]!r}")
        size = int(line, 16)
        start = at + len(line) + 2
        at = start + size + 2
        if data[at - 2 : at] != b"\r\n":
            raise BrokenReplyError(f"the reply breaks off within a chunk: {data[-60:]!r}")
        if size == 0:
            break
        parts.append(data[start : start + size])
    if at != len(data):
        raise BrokenReplyError(f"{data[at : at + 60]!r} comes behind the end")
    return b"".join(parts)


class RawStream:
    """A connection with one request."""

    def __init__(self, address: Address, receive_buffer: int | None = None) -> None:
        self._address = address
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, data: bytes) -> None:
        """Connect and send."""
        await self._loop.sock_connect(self.socket, self._address)
        await self._loop.sock_sendall(self.socket, data)

    async def read(self) -> bytes:
        """Return the bytes that come next; empty: the server has closed the connection."""
        return await self._loop.sock_recv(self.socket, 1 << 18)

    async def read_all(self) -> bytes:
        """Return all bytes up to the end of the connection."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def read_events(self, count: int) -> int:
        """Read until so many events have begun, or the connection ends; returns how many have."""
        found, rest = 0, b""
        while found < count and (part := await self.read()):
            data = rest + part
            found += data.count(b"data: {")
            rest = data[-6:]  # shorter than the mark, so that none counts twice
        return found


async def within(seconds: float, work: Awaitable[Any], what: str) -> Any:
    """Return the result of ``work``; raises BrokenReplyError if it takes longer."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise BrokenReplyError(f"{what} within {seconds:g} s") from None


async def stay(address: Address, request: StreamRequest) -> Any:
    """Send a request, read its whole reply, and return what it says.

    Raises:
        BrokenReplyError: the reply is not complete, or has an error.
    """
    with RawStream(address) as stream:
        await stream.send(request.encode())
        try:
            data = await within(REPLY_S, stream.read_all(), "the reply does not end")
        except OSError as error:
            raise BrokenReplyError(f"the connection broke: {error!r}") from None
        return content_of(data, request)


async def leave(address: Address, request: StreamRequest, how: Leave, count: int, rng: random.Random) -> bool:
    """Send a request whose reply would take long, and leave; returns whether it was after ``count`` events.

    Raises:
        BrokenReplyError: the reply ended before, or the server kept a connection that was half-closed.
    """
    data = request.encode()
    with RawStream(address, receive_buffer=4096 if how == "never reads" else None) as stream:
        if how == "in its request":
            await stream.send(data[: rng.randrange(1, len(data))])
            await asyncio.sleep(rng.uniform(0, 0.2))
            return False
        await stream.send(data)
        if how in ("before its reply", "never reads"):
            await asyncio.sleep(
                rng.uniform(0, MOST_SILENT_S) if how == "never reads" else rng.uniform(0, 0.5)
            )
            return False
        found = await within(REPLY_S, stream.read_events(count), f"{count} events do not come")
        if found < count:
            raise BrokenReplyError(f"the reply ended after {found} of {count} events: {request}")
        if how == "resets":
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "half-closes":
            stream.socket.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                await within(HALF_OPEN_S, stream.read_all(), "a half-closed connection is not closed")
        return True
