"""The interfaces of a transport, which moves KV pages: one of the writer, and one of the reader.

The reader is a rank of the decode worker. It exports its KV pool, and others write to it. The writer is a
rank of the prefill worker. It connects to exported pools and pushes pages to them. A reader gives a page to
another request only when nobody can still write to it: the writer has said so, or the writer is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from segue.disagg.layout import HeadRoute
from segue.errors import TransportError

CONNECT_S = 5.0  # limit for connecting; a reader that runs answers within milliseconds
Peer = NewType("Peer", int)
"""An exported pool that a transport is connected to; a number that the transport uses once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePair:
    """A page to copy."""

    source: int  # page of the writer's pool
    target: int  # page of the reader's pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All pages of a push are in the reader's pool."""

    ticket: int  # that `Transport.push` returned


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A push has ended without all its pages; nothing of it is written any more."""

    ticket: int
    error: TransportError


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A process that may write to an exported pool."""

    number: int  # 1, 2, 3, …: the writers of one exported pool, in the order in which they connected
    session: str  # the connection between the two workers for which it writes
    pid: int


class Transport(Protocol):
    """The writer's side. One thread calls its methods. Only `connect` and `close` may wait.

    The constructor gets a callback `on_ready`, which is called from any thread when `poll` has something new.
    """

    def connect(self, path: str, blob: bytes, route: HeadRoute, session: str, opened_at: float) -> Peer:
        """Connect to an exported pool, to which the heads of `route` will be pushed.

        With `TransportTraits.in_pieces`, heads that are not all of the reader's arrive as a piece
        (`segue.disagg.layout`); otherwise each arrives in its place.

        `path` and `blob` are those of the reader's `RankAddress` and `TransportOffer`; `session` is the
        connection between the two workers that they came over, which was opened at the time `opened_at` of
        the host's monotonic clock. It takes at most CONNECT_S seconds.

        Raises:
            TransportError: nobody answers, the reader refuses, or its pages have another shape.
        """
        ...

    def push(self, peer: Peer, pages: Sequence[PagePair], after: Callable[[], None]) -> int:
        """Copy pages to a peer once `after` returns, after its earlier pushes; returns a ticket at once.

        `after` is called on a thread of the transport. What the thread then does, or queues on its current
        stream of a GPU, comes behind the step that computes the pages. `after` must return or raise
        eventually, because a push cannot be cancelled. `poll` returns one Done or Failed for the ticket.

        Raises:
            PageRangeError: one of the pools has no such page, or it is the scratch page.
            TransportError: the peer is not connected.
        """
        ...

    def poll(self) -> list[Done | Failed]:
        """Return the pushes that have ended since the last call; never waits."""
        ...

    def quiet(self, peer: Peer) -> bool:
        """Whether no push to the peer is queued or runs, and it is not being disconnected."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """Give up the peer's memory after all pushes to it, and tell the reader; returns at once."""
        ...

    def close(self) -> None:
        """Disconnect all peers, and wait until all that is posted has ended."""
        ...


class ExportedPool(Protocol):
    """The reader's side: a KV pool that others write to."""

    @property
    def blob(self) -> bytes:
        """What a writer needs to connect, for a `TransportOffer`."""
        ...

    def close(self) -> None:
        """Let nobody in any more. Processes that write now may still write to the memory."""
        ...


class WatchedPool(ExportedPool, Protocol):
    """An exported pool that knows its writers (`TransportTraits.proves_gone`).

    The constructor gets a callback `on_writer_gone`, which is called from any thread with each `Writer` that
    writes no more.
    """

    def writers(self) -> list[Writer]:
        """Return who may write to the pool: all that connected and are not proven to write no more."""
        ...

    def ban(self, session: str) -> None:
        """Let nobody in any more for a session; who is among its `writers` now may still write."""
        ...
