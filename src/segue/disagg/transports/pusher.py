"""What the writers' sides of all transports keep: their peers, and which pushes to them have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from segue.disagg.transports.base import Done, Failed, PagePair, Peer
from segue.errors import PageRangeError, TransportError


@dataclass(slots=True, kw_only=True, eq=False)
class PushTarget:
    """A peer's pool."""

    peer: Peer = field(init=False)  # its number, once it is added
    num_pages: int
    num_pushes: int = 0  # queued or running
    is_leaving: bool = False


TargetT = TypeVar("TargetT", bound=PushTarget)


class Pusher(Generic[TargetT]):
    """Counts the pushes to each peer; how pages are moved is the transport's own."""

    def __init__(self, num_pages: int, on_ready: Callable[[], None]) -> None:
        """``num_pages`` of this rank's pool; ``on_ready`` is called when a push has ended."""
        self._num_pages = num_pages
        self._on_ready = on_ready
        self._lock = threading.Lock()  # of all below, and of the counts in `PushTarget`
        self._targets: dict[Peer, TargetT] = {}
        self._ended: list[Done | Failed] = []
        self._num_peers = self._num_pushes = 0  # so far
        self._is_closed = False

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

    def _add(self, target: TargetT) -> Peer:
        """Returns the number of a new peer.

        Raises:
            TransportError: the transport was closed while another thread connected; the target is not kept.
        """
        with self._lock:
            if self._is_closed:
                raise TransportError("this worker ends, and connects to no decode worker any more")
            self._num_peers += 1
            target.peer = Peer(self._num_peers)
            self._targets[target.peer] = target
        return target.peer

    def _close(self) -> list[Peer]:
        """Let no peer be added any more; returns those that there are."""
        with self._lock:
            self._is_closed = True
            return list(self._targets)

    def _begin(self, peer: Peer, pages: Sequence[PagePair]) -> tuple[int, TargetT, list[int], list[int]]:
        """Count a push; returns its ticket, its target, and the pages of both pools.

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
            target.num_pushes += 1
            return self._num_pushes, target, sources, targets

    def _note_end(self, event: Done | Failed, target: TargetT) -> None:
        """Report the end of a push."""
        with self._lock:
            target.num_pushes -= 1
            self._ended.append(event)
        self._on_ready()

    def _begin_leaving(self, peer: Peer) -> TargetT | None:
        """Let nothing more be pushed to a peer; returns it, or None if it leaves already or has left."""
        with self._lock:
            target = self._targets.get(peer)
            if target is None or target.is_leaving:
                return None
            target.is_leaving = True
            return target


def _check_pages(which: str, pages: list[int], num_pages: int) -> None:
    """Raise PageRangeError unless all pages are pages of a pool of `num_pages`."""
    for page in pages:
        if not 0 <= page < num_pages:
            raise PageRangeError(
                f"{which} page {page} is not in the KV pool: its pages are 0 to {num_pages - 1}, and the "
                "scratch page after them is never sent. Push pages that both workers have allocated"
            )
