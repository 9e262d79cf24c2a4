"""Hands KV over between workers: dispatches messages, events and deadlines to offers and leases.

It is pure: the scheduler's loop passes messages of connections and events of ranks in, with the time, and
takes what is to be sent from :attr:`TransferMachine.peers`.
"""

from __future__ import annotations

from typing import Protocol, assert_never

from segue.disagg.layout import split_routes
from segue.disagg.lease import LeasePort
from segue.disagg.leases import Leases
from segue.disagg.offer import OfferPort
from segue.disagg.offers import Offers
from segue.disagg.peers import Peers, PeerWorker, ProtocolViolation
from segue.disagg.transports.choice import TRAITS
from segue.messages.kv import (
    BanWriters,
    Bye,
    Claim,
    ConnectPeer,
    DisconnectPeer,
    First,
    Gone,
    Grant,
    HeadPiece,
    Hello,
    KVEvent,
    KVMessage,
    PagesPrepared,
    Ping,
    Pong,
    Pools,
    PromptLogprobs,
    Pushed,
    PushEnded,
    ReservePages,
    Revoke,
    Sent,
    WritersGone,
)


class HandoverPort(OfferPort, LeasePort, Protocol):
    """The part of the scheduler that handing over uses."""


class TransferMachine:
    """The offers and leases of one worker, and its connections to other workers."""

    def __init__(self, port: HandoverPort, *, page_size: int, num_ranks: int) -> None:
        """``page_size`` is in tokens; ``num_ranks`` is this worker's number of tensor-parallel ranks."""
        self.peers = Peers()
        self.offers = Offers(port, self.peers, page_size=page_size, num_ranks=num_ranks)
        self.leases = Leases(port, self.peers, num_ranks=num_ranks)
        self._num_ranks = num_ranks
        self._gone: dict[str, int] = {}  # session -> ranks that nobody can write to for it any more

    @property
    def next_deadline(self) -> float:
        """When :meth:`advance` must be called even if nothing else happens; infinite: never."""
        return min(self.offers.next_deadline, self.leases.next_deadline)

    def advance(self, now: float) -> None:
        """Apply what is due."""
        self.offers.expire(now)
        self.leases.expire(now)

    def on_opened(
        self, number: int, session: str, address: str | None, hello: Hello, transport: str, now: float
    ) -> None:
        """A connection is open; ``transport`` is the kind by which pages move between the two workers.

        A worker that is reached at a second address keeps the first one as well: otherwise requests that name
        it in two ways would close each other's connection, again and again.
        """
        addresses = set() if address is None else {address}
        if (old := self.peers.open.get(hello.incarnation)) is not None:
            addresses |= old.addresses
            self.peers.closes.append((old.number, "the peer has opened another connection"))
            self.on_closed(old.number, now)
        peer = PeerWorker(
            number=number,
            session=session,
            hello=hello,
            transport=transport,
            addresses=addresses,
            pieces=self._pieces_from(hello) if TRAITS[transport].in_pieces else [],
        )
        self.peers.opened(peer)
        if "decode" in hello.work:
            command = ConnectPeer(
                session=session,
                opened_at=now,
                transport=transport,
                tp=hello.tp,
                kv_heads=hello.kv_heads,
                ranks=hello.ranks,
            )
            self.peers.commands.append(command)
        self.leases.link_opened(address, hello.incarnation, now)

    def _pieces_from(self, hello: Hello) -> list[HeadPiece]:
        """Returns as which heads a worker's pages would come into those of the own ranks."""
        return [
            HeadPiece(target_rank=route.target_rank, head=route.target_head, num_heads=route.num_heads)
            for route in split_routes(hello.tp, self._num_ranks, hello.kv_heads)
        ]

    def on_closed(self, number: int, now: float) -> None:
        """A connection is lost; nothing that was under way on it arrives any more."""
        if (peer := self.peers.closed(number)) is not None:
            incarnation = peer.hello.incarnation
            self.offers.link_lost(incarnation, now)
            self.leases.link_lost(incarnation, now)
            if "decode" in peer.hello.work:
                self.peers.commands.append(DisconnectPeer(session=peer.session))
            if "prefill" in peer.hello.work and TRAITS[peer.transport].proves_gone:
                self.peers.commands.append(BanWriters(session=peer.session))

    def leave_all(self, reason: str, now: float) -> None:
        """Close all connections, once what was sent before is written."""
        for peer in list(self.peers.open.values()):
            self.peers.closes.append((peer.number, reason))
            self.on_closed(peer.number, now)

    def on_unreachable(self, address: str, now: float) -> None:
        """No connection to an address could be opened."""
        self.peers.unreachable(address)
        self.leases.unreachable(address, now)

    def on_message(self, number: int, message: KVMessage, now: float) -> None:
        """Handle a message; one that the peer must not send now closes the connection."""
        peer = self.peers.of(number)
        if peer is None:  # it was sent before its connection was closed
            return
        try:
            self._dispatch(peer.hello.incarnation, message, now)
        except ProtocolViolation as error:
            self.peers.closes.append((number, str(error)))
            self.on_closed(number, now)

    def _dispatch(self, peer: str, message: KVMessage, now: float) -> None:
        match message:
            case Claim():
                self.offers.on_claim(peer, message, now)
            case Grant():
                self.offers.on_grant(peer, message, now)
            case Revoke():
                self.offers.on_revoke(peer, message, now)
            case ReservePages():
                self.leases.on_reserve(peer, message, now)
            case Pushed():
                self.leases.on_progress(peer, message, now)
            case PromptLogprobs():
                self.leases.on_logprobs(peer, message, now)
            case First():
                self.leases.on_first(peer, message, now)
            case Sent():
                self.leases.on_sent(peer, message, now)
            case Gone():
                self.leases.on_gone(peer, message, now)
            case Pools():
                raise ProtocolViolation("Pools came twice, or from a worker that does not decode")
            case Ping() | Pong():  # the connection's own thread answers them
                self.leases.on_load(peer, message.step, message.busy, now)
            case Bye():
                pass  # its end follows
            case _:
                assert_never(message)

    def on_rank(self, event: KVEvent, now: float) -> None:
        """Handle an event of one rank."""
        match event:
            case PushEnded():
                self.offers.push_ended(event, now)
            case PagesPrepared():
                self.leases.prepared(event, now)
            case WritersGone():
                self._gone[event.session] = self._gone.get(event.session, 0) + 1
                if self._gone[event.session] == self._num_ranks:
                    del self._gone[event.session]
                    self.leases.writers_gone(event.session, now)
            case _:
                assert_never(event)
