"""Client processes that measure a relay of streams: single requests, many streams, and clients that leave.

They talk to `bench.fake_worker`, directly or through the router. Each function here runs in a process of its
own, and returns plain figures. All times are of `time.perf_counter`, in seconds.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import time
from array import array
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import uvloop

clock = time.perf_counter
T = TypeVar("T")
PROMPT_CHARS = 1024
DEADLINE_S = 20.0  # for what takes milliseconds when nothing is wrong
FOREVER = 1 << 30  # events of a stream that its client ends
_SENT_AT = re.compile(rb'"text":" (\d+)"')
_END = b"\r\n0\r\n\r\n"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous client without the pauses of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        return uvloop.run(work)
    finally:
        gc.enable()


def message(num_events: int, events_per_s: float, rng: random.Random) -> bytes:
    """Return a request for a stream, with a prompt that no other request has."""
    prompt = "".join(rng.choices("abcdefgh ", k=PROMPT_CHARS))
    body = msgspec.json.encode(
        {"prompt": prompt, "max_tokens": num_events, "events_per_s": events_per_s, "stream": True}
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class StreamClient(asyncio.Protocol):
    """One connection. It keeps what arrives while it is recording, and counts bytes always."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.is_recording = False
        self.num_bytes = 0
        self.arrival: asyncio.Future[None] | None = None  # of the next bytes
        self.is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.is_recording:
            self.pieces.append((clock(), data))
        if self.arrival is not None and not self.arrival.done():
            self.arrival.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self.arrival is not None and not self.arrival.done():
            self.arrival.set_exception(ConnectionError("the connection was closed"))

    async def more(self) -> None:
        """Wait for the next bytes."""
        if self.is_lost:
            raise ConnectionError("the connection was closed")
        self.arrival = asyncio.get_running_loop().create_future()
        await asyncio.wait_for(self.arrival, DEADLINE_S)


async def connect(url: str) -> StreamClient:
    """Open a connection."""
    parts = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(StreamClient, parts.hostname, parts.port)
    return client


# --- single requests ---


def probe(urls: Sequence[str], count: int, seed: int) -> list[list[float]]:
    """Send ``count`` requests to each URL, one at a time and by turns, each over one kept connection.

    Returns, for each URL, the seconds from each request to its first event. The first tenth is dropped.
    """

    async def work() -> list[list[float]]:
        rng = random.Random(seed)
        clients = [await connect(url) for url in urls]
        found: list[list[float]] = [[] for _ in urls]
        for number in range(count + count // 10):
            turns = list(enumerate(clients))
            rng.shuffle(turns)
            for index, client in turns:
                seconds = await _first_event(client, message(2, 1000.0, rng))
                if number >= count // 10:
                    found[index].append(seconds)
                await asyncio.sleep(rng.uniform(0, 0.002))
        for client in clients:
            client.transport.abort()
        return found

    return run(work())


async def _first_event(client: StreamClient, request: bytes) -> float:
    """Send a request, and read its whole reply; return the seconds to the first event."""
    client.pieces.clear()
    client.is_recording, began, first = True, clock(), None
    client.transport.write(request)
    reply = b""
    while not reply.endswith(_END):
        await client.more()
        reply = b"".join(data for _, data in client.pieces)
        if first is None and b"data: " in reply:
            first = client.pieces[-1][0]
    assert first is not None, reply
    return first - began


# --- many streams ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What the streams of one client process received between two moments."""

    num_events: int
    transit_s: array[float]  # from the worker's write to the client, of every event whose time was readable
    num_lost: int  # streams that ended although their client had not left
    cpu: float  # share of a core that this process used


def stream(
    url: str, count: int, events_per_s: float, begin: float, end: float, until: float, seed: int
) -> Streamed:
    """Keep ``count`` streams open, and record what they receive from ``begin`` to ``end``.

    They are opened evenly over the time until half a second before ``begin``, and closed at ``until``.
    """

    async def work() -> Streamed:
        rng = random.Random(seed)
        clients, opened_at = [], clock()
        lead = max(0.0, begin - 0.5 - opened_at)
        for number in range(count):
            await asyncio.sleep(opened_at + lead * number / count - clock())
            client = await connect(url)
            client.transport.write(message(FOREVER, events_per_s, rng))
            clients.append(client)
        await asyncio.sleep(begin - clock())
        for client in clients:
            client.is_recording = True
        wall, cpu = clock(), time.process_time()
        await asyncio.sleep(end - clock())
        share = (time.process_time() - cpu) / (clock() - wall)
        for client in clients:
            client.is_recording = False
        await asyncio.sleep(until - clock())
        num_lost = sum(client.is_lost or not client.num_bytes for client in clients)
        for client in clients:
            client.transport.abort()
        return _streamed(clients, num_lost, share)

    return run(work())


def _streamed(clients: Sequence[StreamClient], num_lost: int, cpu: float) -> Streamed:
    transit, num_events = array("d"), 0
    for client in clients:
        for when, data in client.pieces:
            num_events += data.count(b"\n\n\r\n")
            transit.extend(when - int(sent_at) / 1e9 for sent_at in _SENT_AT.findall(data))
    return Streamed(num_events=num_events, transit_s=transit, num_lost=num_lost, cpu=cpu)


# --- clients that leave ---


def leave(url: str, count: int, concurrency: int, most_s: float, seed: int) -> int:
    """Let ``count`` clients leave after random times below ``most_s``; return how many had an event.

    At most ``concurrency`` of them are there at a time. A tenth leaves in the middle of its request.
    """

    async def work() -> int:
        rng = random.Random(seed)
        left, num_begun = count, 0

        async def clients() -> None:
            nonlocal left, num_begun
            while left:
                left -= 1
                client = await connect(url)
                request = message(FOREVER, 50.0, rng)
                size = rng.randrange(len(request)) if rng.random() < 0.1 else len(request)
                client.transport.write(request[:size])
                await asyncio.sleep(rng.uniform(0, most_s))
                num_begun += client.num_bytes > 0
                client.transport.abort()

        with suppress(ConnectionError):
            await asyncio.gather(*(clients() for _ in range(concurrency)))
        return num_begun

    return run(work())
