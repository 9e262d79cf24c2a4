"""Pushes pages of one rank's KV pool to decode workers: the prefill side of a `Mover`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from segue.disagg import layout
from segue.disagg.checksums import PageChecksums
from segue.disagg.layout import HeadRoute
from segue.disagg.transports.base import (
    Done,
    Failed,
    PagePair,
    Peer,
    Transport,
)
from segue.errors import TransportError
from segue.logs import logger
from segue.messages.kv import (
    ConnectPeer,
    DisconnectPeer,
    HeadSums,
    KVEvent,
    PushEnded,
    PushPages,
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    """The pools of one decode worker that this rank pushes to."""

    transport: str  # the kind by which pages get there
    peers: list[tuple[Peer, HeadRoute]] | None = None  # None: they are being connected
    error: str = ""  # why they cannot be pushed to
    waiting: list[PushPages] = field(default_factory=list)  # until they are connected
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """One rank's share of a push, which a transport carries out."""

    ticket: int  # rank 0's, of the push
    route: HeadRoute
    sources: list[int]  # this rank's pages


class PageSender:
    """The prefill side of a rank."""

    def __init__(
        self,
        transports: Mapping[str, Callable[[Callable[[], None]], Transport]],
        *,
        rank: int,
        tp: int,
        queue_behind: Callable[[int], None],
        send: Callable[[KVEvent], None],
        checksums: PageChecksums | None = None,
    ) -> None:
        """Push pages of this rank's pool.

        Args:
            transports: by kind, what makes the transport; the argument is to be called when a push has ended.
            rank: this rank's number.
            tp: the worker's number of ranks.
            queue_behind: lets what the calling thread does next come behind a step; raises if it failed.
            send: takes events; any thread calls it.
            checksums: takes the checksums of what has been pushed; None: there are to be none.
        """
        self._rank, self._tp = rank, tp
        self._queue_behind = queue_behind
        self._send = send
        self._lock = threading.Lock()  # of all below
        self._sessions: dict[str, _Session] = {}
        self._parts: dict[tuple[str, int], _Part] = {}  # by the kind of a transport, and its ticket
        self._missing: dict[int, int] = {}  # rank 0's ticket -> parts that have not ended
        self._errors: dict[int, str] = {}
        self._sums: dict[int, list[HeadSums]] = {}
        self._checksums = checksums
        self._thread = ThreadPoolExecutor(1, "segue-kv-checksum")  # starts a thread when it is first needed
        self._transports = {kind: make(partial(self._report, kind)) for kind, make in transports.items()}

    def connect(self, command: ConnectPeer) -> None:
        """Open the pools of a decode worker's ranks, in a thread: it may take seconds."""
        session = _Session(transport=command.transport)
        with self._lock:
            self._sessions[command.session] = session
        thread = threading.Thread(target=partial(self._connect, session, command), name="segue-kv-connect")
        thread.daemon = True
        thread.start()

    def _connect(self, session: _Session, command: ConnectPeer) -> None:
        peers: list[tuple[Peer, HeadRoute]] = []
        error = ""
        try:
            for route in layout.plan(self._tp, command.tp, command.kv_heads):
                if route.source_rank == self._rank:
                    peers.append((self._connect_rank(command, route), route))
        except TransportError as failure:
            logger.warning("pages cannot be pushed to a decode worker: %s", failure)
            error = failure.message
        except Exception as failure:  # no descriptor is free, for example; pushes must not wait for ever
            logger.exception("the KV pools of a decode worker cannot be opened")
            error = f"its KV pools cannot be opened: {failure!r}"
        with self._lock:
            session.peers, session.error = peers, error
            waiting, session.waiting = session.waiting, []
            has_ended = session.has_ended
        for push in waiting:
            self._post(session, push)
        if has_ended or error:
            self._disconnect(session, peers)

    def _disconnect(self, session: _Session, peers: Sequence[tuple[Peer, HeadRoute]]) -> None:
        for peer, _ in peers:
            self._transports[session.transport].disconnect(peer)

    def _connect_rank(self, command: ConnectPeer, route: HeadRoute) -> Peer:
        address = command.ranks[route.target_rank]
        blob = next(offer.blob for offer in address.offers if offer.kind == command.transport)
        transport = self._transports[command.transport]
        return transport.connect(address.path, blob, route, command.session, command.opened_at)

    def disconnect(self, command: DisconnectPeer) -> None:
        """Give up the pools of a decode worker, after all that was to be pushed to it."""
        with self._lock:
            session = self._sessions.pop(command.session)
            session.has_ended = True
            peers = session.peers or []
        self._disconnect(session, peers)

    def push(self, command: PushPages) -> None:
        """Push pages to a decode worker, once they are computed; `PushEnded` follows."""
        with self._lock:
            session = self._sessions.get(command.session)
            if session is not None and session.peers is None:
                session.waiting.append(command)
                return
        if session is None:
            self._send(PushEnded(ticket=command.ticket, at=time.monotonic(), error="the connection is lost"))
        else:
            self._post(session, command)

    def _post(self, session: _Session, command: PushPages) -> None:
        """Post a push to the pools of all ranks that need pages of this one."""
        pages = [PagePair(source=s, target=t) for s, t in zip(command.sources, command.targets, strict=True)]
        after = partial(self._queue_behind, command.after_step)
        error = session.error
        with self._lock:  # so that no part is reported before it is known
            count = 0
            for peer, route in [] if error else session.peers or []:
                part = _Part(ticket=command.ticket, route=route, sources=command.sources)
                try:
                    ticket = self._transports[session.transport].push(peer, pages, after)
                    self._parts[session.transport, ticket] = part
                    count += 1
                except TransportError as failure:
                    error = failure.message
            if count:
                self._missing[command.ticket], self._errors[command.ticket] = count, error
                self._sums[command.ticket] = []
                return
        self._send(PushEnded(ticket=command.ticket, at=time.monotonic(), error=error))

    def _report(self, kind: str) -> None:
        """Report pushes that have ended; the transport of a kind calls it."""
        now = time.monotonic()
        for event in self._transports[kind].poll():
            with self._lock:
                part = self._parts.pop((kind, event.ticket))
            match event:
                case Failed():
                    self._end(part, now, error=event.error.message)
                case Done() if self._checksums is not None:  # in a thread: the transport's own must go on
                    self._thread.submit(self._take_checksums, self._checksums, part, now)
                case Done():
                    self._end(part, now)

    def _take_checksums(self, checksums: PageChecksums, part: _Part, at: float) -> None:
        """Take the checksums of pages that have been pushed, and that nobody has changed since."""
        route = part.route
        try:
            crcs = checksums(part.sources, route.source_head, route.num_heads)
        except Exception as failure:
            logger.exception("the checksums of %d KV pages cannot be taken", len(part.sources))
            self._end(part, at, error=f"its checksums cannot be taken: {failure!r}")
            return
        target, head = route.target_rank, route.target_head
        self._end(part, at, HeadSums(target_rank=target, head=head, num_heads=route.num_heads, crcs=crcs))

    def _end(self, part: _Part, at: float, sums: HeadSums | None = None, *, error: str = "") -> None:
        """Report a push if this was the last part of it, which was written ``at`` this time."""
        ticket = part.ticket
        with self._lock:
            if error:
                self._errors[ticket] = error
            if sums is not None:
                self._sums[ticket].append(sums)
            self._missing[ticket] -= 1
            if self._missing[ticket]:
                return
            del self._missing[ticket]
            error, heads = self._errors.pop(ticket), self._sums.pop(ticket)
        self._send(PushEnded(ticket=ticket, at=at, error=error, sums=heads))

    def close(self) -> None:
        """Disconnect everything, and wait until all that is posted has ended."""
        for transport in self._transports.values():
            transport.close()
        self._thread.shutdown()
