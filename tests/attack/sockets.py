"""Sockets that never finish what they began, against a server on this machine.

A thousand clients hold connections in every state that costs a server something, and begin anew when they are
closed. Meanwhile ``/health`` is asked again and again, each time on a new connection.
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

MIB = 1 << 20
POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
STREAM = b'{"text": "abc", "sampling_params": {"max_new_tokens": 400, "ignore_eos": true}, "stream": true}'
PROBE_EVERY_S = 0.05
PROBE_TIMEOUT_S = 20.0


@dataclass(slots=True)
class SocketAttack:
    """What an attack did, and what the server did meanwhile."""

    num_opened: Counter[str]  # connections by what they did
    most_open: int  # at one time, as far as this side knows
    health_s: list[float]  # of each question for ``/health``
    failures: Counter[str]  # of those questions, by kind
    memory_growth: int  # bytes of the server's resident memory at its highest, above that at the beginning


def attack(
    host: str, port: int, seconds: float, seed: int, *, num_sockets: int = 1000, pid: int | None = None
) -> SocketAttack:
    """Hold ``num_sockets`` connections for so long; ``pid``: the server's process, whose memory is read.

    The crowd is a process of its own, since what it costs would be measured with the answers.
    """
    arguments = [host, str(port), str(seconds), str(seed), str(num_sockets)]
    memory = [resident(pid)] if pid is not None else [0]
    health_s: list[float] = []
    failures: Counter[str] = Counter()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.attack.sockets", *arguments], stdout=subprocess.PIPE, text=True
    ) as crowd:
        try:
            while crowd.poll() is None:
                began = time.monotonic()
                failure = ask_health(host, port)
                health_s.append(time.monotonic() - began)
                if failure is not None:
                    failures[failure] += 1
                if pid is not None:
                    memory.append(resident(pid))
                time.sleep(PROBE_EVERY_S)
        finally:
            crowd.kill()
        assert crowd.stdout is not None
        num_opened, most_open = json.loads(crowd.stdout.read())
    return SocketAttack(Counter(num_opened), most_open, health_s, failures, max(memory) - memory[0])


def run(target: Target, budget_s: float, rng: random.Random) -> list[Finding]:
    """Hold a thousand connections until the budget is spent; the runner looks at the memory."""
    host, port = target.address
    seen = attack(host, port, budget_s, rng.randrange(1 << 30))
    for kind, count in seen.num_opened.items():
        target.tried[f"sockets: {kind}"] += count
    return [
        Finding(what="/health beside a thousand connections", seen=f"{failure}, {count} times")
        for failure, count in seen.failures.items()
    ]


def ask_health(host: str, port: int) -> str | None:
    """Ask once, on a new connection; what went wrong, if something did."""
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
    """Bytes of a process's memory that are in use."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _raise_descriptor_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


class _Crowd:
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
        """Begin within a second; do the same again and again, each time on a new connection."""
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

    # --- what a client does ---

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
        """Read nothing, until the server gives up."""
        while True:
            await asyncio.sleep(1.0)
            if self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return


def main() -> None:
    """The crowd alone; prints what it did."""
    host, port, seconds, seed, num_sockets = sys.argv[1:]
    _raise_descriptor_limit(int(num_sockets) + 100)
    crowd = _Crowd(host, int(port), time.monotonic() + float(seconds), random.Random(int(seed)))
    asyncio.run(crowd.run(int(num_sockets)))
    print(json.dumps([crowd.num_opened, crowd.most_open]))


if __name__ == "__main__":
    main()
