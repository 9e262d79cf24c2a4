"""Holds sockets that never finish a request, or never read the reply, against a server on this machine.

A thousand clients hold connections in every state that costs the server something, and connect again when the
server closes them. Meanwhile ``/health`` is requested repeatedly, each time on a new connection.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.attack.target import Finding, Target
from tests.support.child import start_child

MIB = 1 << 20
POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
STREAM = b'{"text": "abc", "sampling_params": {"max_new_tokens": 400, "ignore_eos": true}, "stream": true}'
PROBE_EVERY_S = 0.05
PROBE_TIMEOUT_S = 20.0


@dataclass(slots=True)
class SocketAttack:
    """The connections of an attack, and how the server behaved meanwhile."""

    num_opened: Counter[str]  # connections by kind of client
    most_open: int  # most connections at one time, as far as the clients know
    health_s: list[float]  # seconds of each request for `/health`
    failures: Counter[str]  # of those requests, by kind
    memory_growth: int  # bytes from the server's resident memory at the beginning to its maximum


def attack(
    host: str, port: int, seconds: float, seed: int, *, num_sockets: int = 1000, pid: int | None = None
) -> SocketAttack:
    """Hold ``num_sockets`` connections for ``seconds``; ``pid`` is the server's process, to read its memory.

    The clients run in a process of their own, so that their work does not delay the measured answers.
    """
    arguments = [host, str(port), str(seconds), str(seed), str(num_sockets)]
    memory = [resident(pid)] if pid is not None else [0]
    health_s: list[float] = []
    failures: Counter[str] = Counter()
    with start_child(
        [sys.executable, "-m", "tests.attack.sockets", *arguments], stdout=subprocess.PIPE, text=True
    ) as client_process:
        try:
            while client_process.poll() is None:
                began = time.monotonic()
                failure = ask_health(host, port)
                health_s.append(time.monotonic() - began)
                if failure is not None:
                    failures[failure] += 1
                if pid is not None:
                    memory.append(resident(pid))
                time.sleep(PROBE_EVERY_S)
        finally:
            client_process.kill()
        assert client_process.stdout is not None
        num_opened, most_open = json.loads(client_process.stdout.read())
    return SocketAttack(Counter(num_opened), most_open, health_s, failures, max(memory) - memory[0])


def run(target: Target, budget_s: float, rng: random.Random) -> list[Finding]:
    """Hold a thousand connections until the budget is spent; the runner checks the memory."""
    host, port = target.address
    seen = attack(host, port, budget_s, rng.randrange(1 << 30))
    for kind, count in seen.num_opened.items():
        target.tried[f"sockets: {kind}"] += count
    return [
        Finding(what="/health beside a thousand connections", seen=f"{failure}, {count} times")
        for failure, count in seen.failures.items()
    ]


def ask_health(host: str, port: int) -> str | None:
    """Request ``/health`` on a new connection; returns the kind of failure, or None."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
        return None if status == 200 else f"status {status}"
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _raise_descriptor_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


class _Clients:
    """The clients, on one event loop."""

    def __init__(self, host: str, port: int, until: float, rng: random.Random) -> None:
        self._address = host, port
        self._until = until
        self._rng = rng
        self._num_open = 0
        self.most_open = 0
        self.num_opened: Counter[str] = Counter()

    async def run(self, num_sockets: int) -> None:
        acts = (
            self.idle,
            self.half_head,
            self.dripping_head,
            self.many_headers,
            self.half_body,
            self.dripping_body,
            self.slow_reader,
            self.slow_stream,
        )
        clients = [self._client(acts[index % len(acts)]) for index in range(num_sockets)]
        await asyncio.gather(*clients)

    async def _client(self, act: Callable[[_Peer], Awaitable[None]]) -> None:
        """Start within a second; repeat ``act``, each time on a new connection."""
        await asyncio.sleep(self._rng.random())
        while (left := self._until - time.monotonic()) > 0:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(left):
                    await self._connected(act)
            await asyncio.sleep(min(left, self._rng.uniform(0.01, 0.3)))

    async def _connected(self, act: Callable[[_Peer], Awaitable[None]]) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        peer = _Peer(connection, loop)
        try:
            await loop.sock_connect(connection, self._address)
            self.num_opened[act.__name__] += 1
            self._num_open += 1
            self.most_open = max(self.most_open, self._num_open)
            try:
                await act(peer)
            finally:
                self._num_open -= 1
        finally:
            connection.close()

    # --- kinds of clients ---

    async def idle(self, peer: _Peer) -> None:
        await peer.until_closed()

    async def half_head(self, peer: _Peer) -> None:
        await peer.send(POST + b"X-Long: " + b"a" * self._rng.randrange(60_000))
        await peer.until_closed()

    async def dripping_head(self, peer: _Peer) -> None:
        await peer.send(POST)
        while True:
            await peer.send(b"X-Drip: 1\r\n")
            await asyncio.sleep(0.5)

    async def many_headers(self, peer: _Peer) -> None:
        await peer.send(POST + b"a:\r\n" * self._rng.randrange(16_000))
        await peer.until_closed()

    async def half_body(self, peer: _Peer) -> None:
        await peer.send(POST + b"Content-Length: 16000000\r\n\r\n" + b" " * self._rng.randrange(MIB))
        await peer.until_closed()

    async def dripping_body(self, peer: _Peer) -> None:
        await peer.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            await peer.send(b"1\r\n \r\n")
            await asyncio.sleep(0.5)

    async def slow_reader(self, peer: _Peer) -> None:
        await peer.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await peer.forever()

    async def slow_stream(self, peer: _Peer) -> None:
        await peer.send(POST + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
        await peer.forever()


@dataclass(frozen=True, slots=True)
class _Peer:
    """One connection."""

    connection: socket.socket
    loop: asyncio.AbstractEventLoop

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.connection, data)

    async def until_closed(self) -> None:
        while await self.loop.sock_recv(self.connection, 1 << 16):
            pass

    async def forever(self) -> None:
        """Read nothing until the server resets the connection."""
        while True:
            await asyncio.sleep(1.0)
            if self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return


def main() -> None:
    """Run only the clients; prints their counters as JSON."""
    host, port, seconds, seed, num_sockets = sys.argv[1:]
    _raise_descriptor_limit(int(num_sockets) + 100)
    clients = _Clients(host, int(port), time.monotonic() + float(seconds), random.Random(int(seed)))
    asyncio.run(clients.run(int(num_sockets)))
    print(json.dumps([clients.num_opened, clients.most_open]))


if __name__ == "__main__":
    main()
