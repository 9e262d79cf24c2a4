"""The workers that this one hands KV to or gets it from, and what is to be sent to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.messages.kv import HeadPiece, Hello, KVCommand, KVMessage


class ProtocolViolation(Exception):
    """A peer sent a message that it must not send now; the text says which. Its connection is closed."""


@dataclass(slots=True, kw_only=True)
class PeerWorker:
    """A worker at the other end of an open connection."""

    number: int  # of the connection; never used again
    session: str  # the connection's name, which both ends know
    hello: Hello
    transport: str  # the kind by which pages move between the two
    addresses: set[str]  # where it was reached, which may have several names; empty: it opened the connection
    # As which heads its pages come into those of the own ranks, where these have to be put in order.
    pieces: list[HeadPiece] = field(default_factory=list)
    step: int = -1  # the last step that it said it had launched
    step_since: float = 0.0  # when it first said so
    is_suspect: bool = False  # a push between the two is stuck: no new lease until it is over


@dataclass(slots=True)
class Peers:
    """The open connections by the incarnation of the worker at the other end, and what is to be sent.

    An incarnation has at most one connection. The caller takes :attr:`messages`, :attr:`commands`,
    :attr:`closes` and :attr:`connects`, and empties them.
    """

    open: dict[str, PeerWorker] = field(default_factory=dict)
    messages: list[tuple[int, KVMessage]] = field(default_factory=list)  # (connection, message), in order
    commands: list[KVCommand] = field(default_factory=list)  # to every own rank, in order
    closes: list[tuple[int, str]] = field(default_factory=list)  # (connection, reason)
    connects: list[str] = field(default_factory=list)  # addresses to connect to
    _connecting: set[str] = field(default_factory=set)  # until the connection is open, or cannot be opened

    def opened(self, peer: PeerWorker) -> None:
        """Note a new connection."""
        self.open[peer.hello.incarnation] = peer
        self._connecting -= peer.addresses

    def connect(self, address: str) -> None:
        """Ask for a connection to an address, unless it is open or being opened."""
        if self.at(address) is None and address not in self._connecting:
            self._connecting.add(address)
            self.connects.append(address)

    def unreachable(self, address: str) -> None:
        """No connection to an address could be opened; it may be tried again."""
        self._connecting.discard(address)

    def closed(self, number: int) -> PeerWorker | None:
        """Forget a connection; returns its peer, or None if it is not known."""
        for incarnation, peer in self.open.items():
            if peer.number == number:
                return self.open.pop(incarnation)
        return None

    def at(self, address: str) -> PeerWorker | None:
        """Returns the peer that was reached at an address, if its connection is open."""
        return next((peer for peer in self.open.values() if address in peer.addresses), None)

    def of(self, number: int) -> PeerWorker | None:
        """Returns the peer of a connection, if it is open."""
        return next((peer for peer in self.open.values() if peer.number == number), None)

    def send(self, incarnation: str, message: KVMessage) -> None:
        """Send a message; without a connection it is dropped, and the other end asks again over the next."""
        if (peer := self.open.get(incarnation)) is not None:
            self.messages.append((peer.number, message))

    def close(self, incarnation: str, reason: str) -> None:
        """Ask for a connection to be closed; its end is reported like any other."""
        if (peer := self.open.get(incarnation)) is not None:
            self.closes.append((peer.number, reason))
