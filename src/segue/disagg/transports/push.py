"""The writer's side of all transports whose pools are memory with a descriptor.

A writer connects to the reader's unix socket, gets the descriptor, and maps the memory. One thread then does
one push after the other. How memory is mapped and copied to is the transport's own: `PageMemory`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import msgspec

from segue.disagg.layout import HeadRoute
from segue.disagg.transports.base import CONNECT_S, Done, Failed, PagePair, Peer
from segue.disagg.transports.export import PoolOffer, read_offer, shape_of
from segue.disagg.transports.pusher import Pusher, PushTarget
from segue.disagg.transports.writers import MAX_MESSAGE_BYTES, RELEASED, Greeting
from segue.errors import PeerLostError, SharedMemoryError, TransportError
from segue.kvcache.pool import KVPool
from segue.memory import shared

logger = logging.getLogger(__name__)


class MappedPool(Protocol):
    """A reader's pool that a writer has mapped, and the heads of its pages that are written."""

    def write(self, sources: Sequence[int], targets: Sequence[int], after: Callable[[], None]) -> None:
        """Copy pages to the page at the same index, once `after` says so; returns when they are written.

        It is called on one thread at a time, and must not hold the GIL for long.
        """
        ...

    def close(self) -> None:
        """Unmap the pool."""
        ...


class PageMemory(Protocol):
    """A rank's own pool, whose pages are pushed, and the way of mapping others."""

    def map_pool(self, descriptor: int, offer: PoolOffer, route: HeadRoute) -> MappedPool:
        """Map a pool, to which the heads of `route` will be written; the caller closes the descriptor.

        Raises:
            OSError, SharedMemoryError: it cannot be mapped.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Target(PushTarget):
    """An exported pool that a writer has mapped."""

    path: str  # of the reader's socket
    connection: socket.socket  # open as long as the memory is mapped
    memory: MappedPool

    def check_alive(self) -> None:
        """Raise PeerLostError if the reader has ended, or has closed the connection."""
        if shared.is_closed(self.connection):
            raise PeerLostError(
                f"the decode worker at {self.path!r} has ended, or has closed the connection; disconnect "
                "from it, and push to another one"
            )


class PushTransport(Pusher[_Target]):
    """Pushes pages of this rank's KV pool to pools that other ranks export (`Transport`)."""

    def __init__(self, pool: KVPool, memory: PageMemory, on_ready: Callable[[], None]) -> None:
        """Start the thread that copies.

        Args:
            pool: this rank's pool.
            memory: copies pages of `pool` to others.
            on_ready: called from the thread when a push has ended; must neither block nor raise.
        """
        super().__init__(pool.num_pages, on_ready)
        self._shape = shape_of(pool)
        self._memory = memory
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: end the thread
        self._thread = threading.Thread(target=self._work, name="segue-kv-push", daemon=True)
        self._thread.start()

    def connect(self, path: str, blob: bytes, route: HeadRoute, session: str, opened_at: float) -> Peer:
        """Map an exported pool, to which the heads of `route` will be pushed for a session.

        Raises:
            TransportError: nobody answers within CONNECT_S seconds, the reader refuses, its pages have
                another shape, or this transport has been closed meanwhile.
        """
        offer = read_offer(path, blob)
        route.check(self._shape, offer.shape)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            descriptor = _get_descriptor(connection, path, Greeting(offer.token, session, opened_at))
            try:
                memory = self._memory.map_pool(descriptor, offer, route)
            except (OSError, SharedMemoryError) as error:
                raise TransportError(f"the KV pool of {path!r} cannot be mapped: {error}") from error
            finally:
                os.close(descriptor)
        except BaseException:
            _leave(connection)
            raise
        target = _Target(path=path, connection=connection, memory=memory, num_pages=offer.num_pages)
        try:
            return self._add(target)
        except TransportError:
            memory.close()
            _leave(connection)
            raise

    def push(self, peer: Peer, pages: Sequence[PagePair], after: Callable[[], None]) -> int:
        """Copy pages to a peer once `after` returns, after all earlier pushes; returns a ticket at once.

        A push to a reader that has ended fails, even if that is noticed only after the last page.

        Raises:
            PageRangeError: one of the pools has no such page, or it is the scratch page.
            TransportError: the peer is not connected.
        """
        ticket, target, sources, targets = self._begin(peer, pages)
        self._jobs.put(partial(self._push, ticket, target, sources, targets, after))
        return ticket

    def disconnect(self, peer: Peer) -> None:
        """Unmap the peer's memory after all pushes, and tell the reader; returns at once."""
        if (target := self._begin_leaving(peer)) is not None:
            self._jobs.put(partial(self._release, target))

    def close(self) -> None:
        """Disconnect all peers, and wait until all that is posted has ended."""
        for peer in self._close():
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
            target.memory.write(sources, targets, after)
            target.check_alive()
            event = Done(ticket=ticket)
        except TransportError as error:
            event = Failed(ticket=ticket, error=error)
        except Exception as error:
            logger.exception("a push of %d KV pages failed", len(sources))
            event = Failed(ticket=ticket, error=TransportError(f"the push failed: {error!r}"))
        self._note_end(event, target)

    def _release(self, target: _Target) -> None:
        """Unmap a peer's memory, and tell the reader so."""
        try:
            target.memory.close()
        except Exception:  # the reader then waits for the end of this process
            logger.exception("the KV pool of %r cannot be unmapped", target.path)
            target.connection.close()
        else:
            _leave(target.connection)
        with self._lock:
            del self._targets[target.peer]


def _leave(connection: socket.socket) -> None:
    """Tell the reader that this rank has no mapping of its pool, and close the connection."""
    with suppress(OSError):  # the reader has ended
        connection.send(RELEASED)
    connection.close()


def _get_descriptor(connection: socket.socket, path: str, greeting: Greeting) -> int:
    """Connect to a reader's socket, and return the descriptor that it gives."""
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
    return descriptor
