"""KV pages between processes of one host, in the memory of the CPU.

The reader's pool is shared memory. A writer maps it, and one thread copies pages into it with numpy.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import msgspec
import numpy as np
import torch

from segue.disagg.layout import HeadRoute, PageShape
from segue.disagg.transports.base import CONNECT_S, Done, Failed, PagePair, Peer, Writer
from segue.disagg.transports.page_copy import copy_pages
from segue.disagg.transports.writers import MAX_MESSAGE_BYTES, RELEASED, Greeting, WriterWatch
from segue.errors import PageRangeError, PeerLostError, SharedMemoryError, TransportError
from segue.kvcache.pool import KVPool
from segue.memory import shared

logger = logging.getLogger(__name__)


class _Blob(msgspec.Struct, frozen=True, array_like=True):
    """What a writer needs to know of an exported pool."""

    token: bytes  # 32 random bytes
    num_pages: int  # without the scratch page, which follows them
    shape: PageShape


class ShmExport:
    """A KV pool in shared memory that others write to (`ExportedPool`)."""

    def __init__(
        self, pool: KVPool, descriptor: int, path: str, on_writer_gone: Callable[[Writer], None]
    ) -> None:
        """Let writers in at the unix socket `path`.

        Args:
            pool: the pool, in the memory of `descriptor`.
            descriptor: of `shared.create`, for exactly the bytes of the pool; the caller keeps it open.
            path: of the socket, which must not exist; its directory is the caller's.
            on_writer_gone: called from a thread, once per writer; must neither block nor raise.

        Raises:
            TransportError: the socket cannot be made.
        """
        size, needed = os.fstat(descriptor).st_size, (pool.num_pages + 1) * pool.page_bytes
        assert size == needed, f"the pool has {needed} bytes, and the shared memory {size}"
        token = secrets.token_bytes(32)
        self.blob = msgspec.msgpack.encode(_Blob(token, pool.num_pages, shape_of(pool)))
        self._watch = WriterWatch(path, token, descriptor, on_writer_gone)

    def writers(self) -> list[Writer]:
        """Return who may write to the pool: all that connected and are not proven to write no more."""
        return self._watch.writers()

    def ban(self, session: str) -> None:
        """Let nobody in any more for a session; who is among its `writers` now may still write."""
        self._watch.ban(session)

    def close(self) -> None:
        """Let nobody in any more. Processes that are `writers` now may still write to the memory."""
        self._watch.close()


@dataclass(slots=True, kw_only=True, eq=False)
class _Target:
    """An exported pool that a writer has mapped."""

    path: str  # of the reader's socket
    connection: socket.socket  # open as long as the memory is mapped
    memory: mmap.mmap
    num_pages: int
    shape: PageShape
    route: HeadRoute
    num_pushes: int = 0  # queued or running
    is_leaving: bool = False

    def check_alive(self) -> None:
        """Raise PeerLostError if the reader has ended, or has closed the connection."""
        if shared.is_closed(self.connection):
            raise PeerLostError(
                f"the decode worker at {self.path!r} has ended, or has closed the connection; disconnect "
                "from it, and push to another one"
            )


class ShmTransport:
    """Pushes pages of this rank's KV pool to pools that other ranks export (`Transport`)."""

    def __init__(self, pool: KVPool, on_ready: Callable[[], None]) -> None:
        """Start the thread that copies.

        Args:
            pool: this rank's pool, in any memory of the CPU.
            on_ready: called from the thread when a push has ended; must neither block nor raise.
        """
        self._num_pages = pool.num_pages
        self._shape = shape_of(pool)
        self._source = pool.data.view(torch.uint8).numpy().reshape(-1)
        self._on_ready = on_ready
        self._lock = threading.Lock()  # of the three below, and of the counts in `_Target`
        self._targets: dict[Peer, _Target] = {}
        self._ended: list[Done | Failed] = []
        self._num_peers = self._num_pushes = 0  # so far
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: end the thread
        self._thread = threading.Thread(target=self._work, name="segue-kv-push", daemon=True)
        self._thread.start()

    def connect(self, path: str, blob: bytes, route: HeadRoute, session: str) -> Peer:
        """Map an exported pool, to which the heads of `route` will be pushed for a session.

        Raises:
            TransportError: nobody answers within CONNECT_S seconds, the reader refuses, or its pages have
                another shape.
        """
        try:
            export = msgspec.msgpack.decode(blob, type=_Blob)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the offer of shared memory at {path!r} cannot be read ({error}); both workers must run the "
                "same version of Segue"
            ) from error
        route.check(self._shape, export.shape)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            memory = _map_export(connection, path, Greeting(export.token, session), export)
        except BaseException:
            _leave(connection)
            raise
        target = _Target(
            path=path,
            connection=connection,
            memory=memory,
            num_pages=export.num_pages,
            shape=export.shape,
            route=route,
        )
        with self._lock:
            self._num_peers += 1
            peer = Peer(self._num_peers)
            self._targets[peer] = target
        return peer

    def push(self, peer: Peer, pages: Sequence[PagePair], after: Callable[[], None]) -> int:
        """Copy pages to a peer once `after` returns, after all earlier pushes; returns a ticket at once.

        A push to a reader that has ended fails, even if that is noticed only after the last page.

        Raises:
            PageRangeError: one of the pools has no such page, or it is the scratch page.
            TransportError: the peer is not connected.
        """
        target = self._targets.get(peer)
        if target is None or target.is_leaving:
            raise TransportError(f"peer {peer} is not connected; connect to its pool before pushing to it")
        sources, targets = [pair.source for pair in pages], [pair.target for pair in pages]
        _check_pages("source", sources, self._num_pages)
        _check_pages("target", targets, target.num_pages)
        with self._lock:
            self._num_pushes += 1
            ticket = self._num_pushes
            target.num_pushes += 1
        self._jobs.put(partial(self._push, ticket, target, sources, targets, after))
        return ticket

    def poll(self) -> list[Done | Failed]:
        """Return the pushes that have ended since the last call; never waits."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def quiet(self, peer: Peer) -> bool:
        """Whether no push to the peer is queued or runs, and it is not being disconnected."""
        with self._lock:
            target = self._targets.get(peer)
            return target is None or not (target.num_pushes or target.is_leaving)

    def disconnect(self, peer: Peer) -> None:
        """Unmap the peer's memory after all pushes, and tell the reader; returns at once."""
        with self._lock:
            target = self._targets.get(peer)
            if target is None or target.is_leaving:
                return
            target.is_leaving = True
        self._jobs.put(partial(self._release, peer, target))

    def close(self) -> None:
        """Disconnect all peers, and wait until all that is posted has ended."""
        for peer in list(self._targets):
            self.disconnect(peer)
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        """The thread: do one job after the other."""
        while (job := self._jobs.get()) is not None:
            job()

    def _push(
        self, ticket: int, target: _Target, sources: list[int], targets: list[int], after: Callable[[], None]
    ) -> None:
        """Do one push, and note how it ended."""
        event: Done | Failed
        try:
            after()
            target.check_alive()
            self._copy(target, sources, targets)
            target.check_alive()
            event = Done(ticket=ticket)
        except TransportError as error:
            event = Failed(ticket=ticket, error=error)
        except Exception as error:
            logger.exception("a push of %d KV pages failed", len(sources))
            event = Failed(ticket=ticket, error=TransportError(f"the push failed: {error!r}"))
        with self._lock:
            target.num_pushes -= 1
            self._ended.append(event)
        self._on_ready()

    def _copy(self, target: _Target, sources: list[int], targets: list[int]) -> None:
        """Copy pages; only here is there a view of the mapping, which could not be closed with one."""
        memory = np.frombuffer(target.memory, np.uint8)
        copy_pages(self._source, self._shape, sources, memory, target.shape, targets, target.route)

    def _release(self, peer: Peer, target: _Target) -> None:
        """Unmap a peer's memory, and tell the reader so."""
        target.memory.close()
        _leave(target.connection)
        with self._lock:
            del self._targets[peer]


def shape_of(pool: KVPool) -> PageShape:
    """Return the shape of a pool's pages."""
    *_, num_heads, head_dim = pool.data.shape
    return PageShape(
        num_layers=pool.num_layers,
        page_size=pool.page_size,
        num_heads=num_heads,
        head_bytes=head_dim * pool.data.element_size(),
    )


def _check_pages(which: str, pages: list[int], num_pages: int) -> None:
    """Raise PageRangeError unless all pages are pages of a pool of `num_pages`."""
    for page in pages:
        if not 0 <= page < num_pages:
            raise PageRangeError(
                f"{which} page {page} is not in the KV pool: its pages are 0 to {num_pages - 1}, and the "
                "scratch page after them is never sent. Push pages that both workers have allocated"
            )


def _leave(connection: socket.socket) -> None:
    """Tell the reader that this rank has no mapping of its pool, and close the connection."""
    with suppress(OSError):  # the reader has ended
        connection.send(RELEASED)
    connection.close()


def _map_export(connection: socket.socket, path: str, greeting: Greeting, export: _Blob) -> mmap.mmap:
    """Connect to a reader's socket, and map the memory that it gives."""
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(path)
        if (uid := shared.peer_ids(connection)[1]) != os.geteuid():
            raise TransportError(
                f"the unix socket {path!r} is of user {uid}, and this worker of user {os.geteuid()}; run "
                "both as one user"
            )
        connection.send(msgspec.msgpack.encode(greeting))
        message, descriptor = shared.receive_descriptor(connection, MAX_MESSAGE_BYTES)
    except OSError as error:
        raise TransportError(
            f"the decode worker at the unix socket {path!r} does not answer ({error}); it must run, and "
            "be on this host"
        ) from error
    if descriptor is None:
        why = message.decode(errors="replace") or "it closed the connection"
        raise TransportError(f"the decode worker at {path!r} refuses this writer: {why}")
    try:
        return shared.map_shared(descriptor, (export.num_pages + 1) * export.shape.page_bytes)
    except (OSError, SharedMemoryError) as error:
        raise TransportError(f"the KV pool of {path!r} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
