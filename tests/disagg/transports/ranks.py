"""Pools and ranks for the tests of transports, in the test's process and in processes of their own."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.disagg.layout import HeadRoute, plan
from segue.disagg.transports.base import Done, Failed, PagePair, Peer, Transport, Writer
from segue.disagg.transports.cuda_ipc import DevicePages
from segue.disagg.transports.export import PoolExport
from segue.disagg.transports.push import PushTransport
from segue.disagg.transports.shm import HostPages
from segue.errors import SegueError
from segue.kvcache.pool import KVPool, KVShape
from segue.memory.rank_memory import SharedKVMemory
from tests.support.child import start_child

DEADLINE_S = 60.0
START_S = 100.0  # of a process: it imports torch, which takes 16 s where eight processes share two cores
(WHOLE,) = plan(1, 1, kv_heads=2)


def shape_of_pool(
    num_pages: int = 6, num_kv_heads: int = 2, page_size: int = 4, head_dim: int = 8
) -> KVShape:
    return KVShape(
        num_pages=num_pages,
        num_layers=3,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.uint8,
    )


LARGE = shape_of_pool(num_pages=3, head_dim=512 << 10)  # pages of 24 MiB


def filled_pool(shape: KVShape, first: int = 1, device: str = "cpu") -> KVPool:
    """A pool in private memory: all bytes of page i are first + i."""
    pool = KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device))
    for page in range(shape.num_pages + 1):
        pool.data[page] = first + page
    return pool


def pairs(*pages: tuple[int, int]) -> list[PagePair]:
    return [PagePair(source=source, target=target) for source, target in pages]


def wait_for(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S), "the event was not set"


class Reader:
    """An exported pool, and the writers that are gone."""

    def __init__(self, path: Path, shape: KVShape | None = None, device: str = "cpu") -> None:
        shape = shape or shape_of_pool()
        self.path = str(path)
        memory = SharedKVMemory(torch.device(device))
        self.pool = KVPool(shape, memory.take_kv(shape.num_bytes))
        assert memory.kv_descriptor is not None
        self.descriptor = memory.kv_descriptor
        self.gone: list[Writer] = []
        self.states: list[str] = []  # of the writers' processes when they were gone
        self.export = PoolExport(self.pool, self.descriptor, self.path, self._note)

    def _note(self, writer: Writer) -> None:
        self.states.append(process_state(writer.pid))
        self.gone.append(writer)

    @property
    def pages(self) -> Tensor:
        """The first byte of each page, the scratch page included."""
        return self.pool.data.flatten(1)[:, 0]

    def close(self) -> None:
        self.export.close()
        os.close(self.descriptor)


def by_descriptor(pool: KVPool, on_ready: Callable[[], None]) -> PushTransport:
    memory = HostPages(pool) if pool.data.device.type == "cpu" else DevicePages(pool)
    return PushTransport(pool, memory, on_ready)


class Sender:
    """A transport, and the events of its pushes."""

    def __init__(
        self,
        pool: KVPool,
        session: str = "prefill/0",
        make: Callable[[KVPool, Callable[[], None]], Transport] = by_descriptor,
    ) -> None:
        self.session = session
        self._news = threading.Event()
        self._events: dict[int, Done | Failed] = {}
        self.order: list[int] = []  # tickets, as they ended
        self.pool = pool
        self.transport = make(pool, self._news.set)

    def connect(self, reader: Reader, route: HeadRoute = WHOLE) -> Peer:
        return self.transport.connect(reader.path, reader.export.blob, route, self.session, time.monotonic())

    def push(
        self, peer: Peer, pages: Sequence[PagePair], after: Callable[[], None] = lambda: None
    ) -> Done | Failed:
        return self.wait(self.transport.push(peer, pages, after))

    def wait(self, ticket: int) -> Done | Failed:
        """The event of a push; nothing polls before it is told to."""
        deadline = time.monotonic() + DEADLINE_S
        while ticket not in self._events:
            assert self._news.wait(deadline - time.monotonic()), f"push {ticket} has not ended"
            self._news.clear()
            for event in self.transport.poll():
                assert event.ticket not in self._events, "a push has ended twice"
                self._events[event.ticket] = event
                self.order.append(event.ticket)
        return self._events[ticket]


class WriterRank:
    """What a writer's process does."""

    def __init__(self, shape: KVShape, device: str) -> None:
        self._sender = Sender(filled_pool(shape, device=device), "prefill/7")

    def connect(self, path: str, blob: bytes) -> Peer:
        return self._sender.transport.connect(path, blob, WHOLE, self._sender.session, time.monotonic())

    def push(self, peer: Peer, pages: list[PagePair]) -> Done | Failed:
        return self._sender.push(peer, pages)

    def post(self, peer: Peer, pages: list[PagePair]) -> int:
        return self._sender.transport.push(peer, pages, lambda: None)

    def post_many(self, peer: Peer, pages: list[PagePair], count: int) -> None:
        for _ in range(count):
            self.post(peer, pages * 1000)

    def disconnect(self, peer: Peer) -> None:
        self._sender.transport.disconnect(peer)

    def break_connection(self, peer: Peer) -> None:
        """Close the connection and keep the mapping, as a writer with a fault would."""
        self._sender.transport._targets[peer].connection.close()


class ReaderRank:
    """What a reader's process does."""

    def __init__(self, shape: KVShape, device: str) -> None:
        self._shape = shape
        self._device = device

    def export(self, path: str) -> bytes:
        self._reader = Reader(Path(path), self._shape, self._device)
        return self._reader.export.blob

    def gone(self) -> list[Writer]:
        return self._reader.gone


class Remote:
    """A rank in a process of its own; each call runs a method there."""

    def __init__(self, kind: type, shape: KVShape, device: str = "cpu") -> None:
        ours, theirs = socket.socketpair()
        program = [sys.executable, "-m", "tests.disagg.transports.ranks", str(theirs.fileno())]
        self.process = start_child(program, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._pipe.send((kind, shape, device))
        self._has_started = False

    def __call__(self, method: str, *arguments: Any) -> Any:
        if not self._has_started:
            assert self._pipe.poll(START_S), "the process does not start"
            self._has_started = self._pipe.recv()
        self._pipe.send((method, arguments))
        assert self._pipe.poll(DEADLINE_S), f"{method} takes too long"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()


def process_state(pid: int) -> str:
    """The state of a process as the kernel shows it: R, S, D: it runs; T: stopped; Z: ended; or nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    kind, shape, device = pipe.recv()
    rank = kind(shape, device)
    pipe.send(True)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the test has ended without ending this process
            return
        try:
            pipe.send(getattr(rank, method)(*arguments))
        except SegueError as error:
            pipe.send(error)


if __name__ == "__main__":
    main()
