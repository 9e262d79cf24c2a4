"""One side of handing over, without a scheduler: a test does what the scheduler and the other worker do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.disagg.lease import Lease, LeaseState
from segue.disagg.leases import Leases
from segue.disagg.offer import HeldPages, Offer, OfferState
from segue.disagg.offers import Offers
from segue.disagg.peers import Peers, PeerWorker
from segue.kvcache.prefix_cache import Node
from segue.messages.kv import (
    Claim,
    First,
    Gone,
    GoneReason,
    Grant,
    HeadSums,
    KVIdentity,
    PushEnded,
    PushPages,
    ReservePages,
    Revoke,
    Sent,
)
from segue.messages.requests import FinishReason, TokenLogprob, pack_ids
from tests.support.kv_hello import hello

PAGE_SIZE = 4
VOCAB_SIZE = 1000
NUM_TOKENS = 10  # of the prompt: two full pages, and one with two tokens
HASH = b"the prompt"
V1 = KVIdentity("v1", 1)
ADDRESS = "127.0.0.1:8998"


def hold(*pages: int) -> HeldPages:
    """Pages without any in the prefix cache."""
    return HeldPages(list(pages), 0, Node(None, (), -1))


def first(handoff: int = 1, finished: FinishReason | None = None, **fields: Any) -> First:
    """A first token."""
    return First(handoff=handoff, token=5, version="v1", cached_tokens=0, seed=0, finished=finished, **fields)


class FakeHandoverPort:
    """What the scheduler is to offers and leases: it notes what they do."""

    def __init__(self) -> None:
        self.home: list[int] = []  # pages that were given back
        self.room: list[HeldPages] = []  # that the next leases get
        self.firsts: list[str] = []  # rids
        self.given_up: list[tuple[str, GoneReason]] = []

    def pages(self, rid: str) -> Sequence[int]:
        return [11, 12, 13]

    def release(self, hold: HeldPages) -> None:
        self.home += hold.pages

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def may_start(self, rid: str) -> bool:
        return True

    def take(self, rid: str) -> HeldPages | None:
        return self.room.pop(0) if self.room else None

    def take_first(self, rid: str, first: First, logprobs: list[TokenLogprob]) -> None:
        self.firsts.append(rid)

    def give_up(self, rid: str, reason: GoneReason, message: str) -> None:
        self.given_up.append((rid, reason))


class Side:
    """What both sides have: peers with names, and what was sent to them."""

    def __init__(self) -> None:
        self.port = FakeHandoverPort()
        self.peers = Peers()
        self.num_links = 0
        self.now = 0.0
        self.transport = "shm"  # of connections that are opened

    def link(self, name: str, address: str | None = None) -> None:
        """Open a connection to a peer."""
        self.num_links += 1
        role = "decode" if address is None else "prefill"
        self.peers.opened(
            PeerWorker(
                number=self.num_links,
                session=f"s{self.num_links}",
                hello=hello(role, incarnation=name),
                transport=self.transport,
                addresses=set() if address is None else {address},
            )
        )

    def sent(self, name: str) -> list[Any]:
        """Take the messages to a peer."""
        number = self.peers.open[name].number
        mine = [message for to, message in self.peers.messages if to == number]
        self.peers.messages = [each for each in self.peers.messages if each[0] != number]
        return mine


class PrefillSide(Side):
    """A prefill worker with handoff 1, and the decode workers d0 and d1."""

    def __init__(self) -> None:
        super().__init__()
        self.offers = Offers(self.port, self.peers, page_size=PAGE_SIZE, num_ranks=1)
        for name in ("d0", "d1"):
            self.link(name)

    @property
    def offer(self) -> Offer:
        return self.offers.by_handoff[1]

    @property
    def state(self) -> str:
        """The offer's state; one that has ended is not kept."""
        if 1 not in self.offers.by_handoff:
            return "ENDED"
        assert self.offer.state is not OfferState.ENDED
        return self.offer.state.name

    def begin(self) -> None:
        self.offers.add(1, "r", NUM_TOKENS, HASH, self.now)
        self.offer.reason = "unknown"  # that of an earlier lease, which is not said again

    def claim(self, name: str = "d0", prompt_hash: bytes = HASH) -> None:
        claim = Claim(handoff=1, rid="r", num_tokens=NUM_TOKENS, prompt_hash=prompt_hash)
        self.offers.on_claim(name, claim, self.now)

    def launch(self, tokens: int, step: int = 1) -> None:
        self.offers.launched(1, tokens, step, V1, self.now)

    def grant(self, name: str = "d0", first_page: int = 0, pages: Sequence[int] = (21, 22, 23)) -> None:
        grant = Grant(handoff=1, lease=self.offer.lease, first_page=first_page, pages=pack_ids(pages))
        self.offers.on_grant(name, grant, self.now)

    def revoke(self, *, final: bool, name: str = "d0", lease: int | None = None) -> None:
        number = self.offer.lease if lease is None else lease
        self.offers.on_revoke(name, Revoke(handoff=1, lease=number, reason="ended", final=final), self.now)

    def first(self, finished: FinishReason | None = None, now: float | None = None) -> None:
        """The request ends with its first token."""
        now = self.now if now is None else now
        self.offers.first(first(finished=finished), now)
        self.give_up_pages()
        self.offers.request_ended(1, now)

    def abort(self) -> None:
        """The request ends without a first token."""
        self.give_up_pages()
        self.offers.request_ended(1, self.now)

    def retract(self) -> None:
        """The request gives up its KV, and waits."""
        self.give_up_pages()
        self.offers.retracted(1, self.now)

    def give_up_pages(self) -> None:
        held = hold(11, 12, 13)
        if not self.offers.take_over(1, held):
            self.port.release(held)

    def pushes(self) -> list[PushPages]:
        """Take the pushes that were posted."""
        commands, self.peers.commands = self.peers.commands, []
        return [each for each in commands if isinstance(each, PushPages)]

    def end_pushes(self, error: str = "") -> None:
        """All pushes end."""
        for ticket in list(self.offer.pushes):
            self.offers.push_ended(PushEnded(ticket=ticket, at=1.0, error=error), 1.0)

    def reach(self, state: str) -> None:
        """Bring handoff 1 into a state, with its first chunk of 4 tokens launched."""
        self.begin()
        self.launch(4)
        if state == "OPEN":
            return
        self.claim()
        if state == "CLAIMED":
            return
        self.grant()
        if state == "DRAINING":
            self.revoke(final=False)
        assert self.state == state
        self.sent("d0")


class DecodeSide(Side):
    """A decode worker with handoff 1, and the prefill worker p0."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(self.port, self.peers, num_ranks=2)
        self.link("p0", ADDRESS)
        self.lease = self.new_lease()

    def new_lease(self, handoff: int = 1) -> Lease:
        return Lease(
            handoff=handoff,
            rid=f"r{handoff}",
            address=ADDRESS,
            num_tokens=NUM_TOKENS,
            prompt_hash=HASH,
            order=(0, handoff),
        )

    @property
    def state(self) -> str:
        return self.lease.state.name

    def claim(self) -> None:
        self.leases.claim(self.lease, 0.0)

    def reserve(self, number: int = 7, num_tokens: int = NUM_TOKENS) -> None:
        message = ReservePages(handoff=1, lease=number, num_tokens=num_tokens)
        self.leases.on_reserve("p0", message, 0.0)

    def grant(self) -> None:
        self.port.room.append(hold(21, 22, 23))
        self.leases.grant_all(0.0)

    def first(self, now: float = 0.0, **fields: Any) -> None:
        self.leases.on_first("p0", first(**fields), now)

    def landed(self, now: float = 0.0, number: int = 7, sums: Sequence[HeadSums] = ()) -> None:
        """The prefill worker says Sent."""
        message = Sent(handoff=1, lease=number, pages=3, identities=[V1], sums=list(sums))
        self.leases.on_sent("p0", message, now)

    def gone(self, *, again: bool = False, now: float = 0.0, number: int | None = None) -> None:
        """The prefill worker says Gone."""
        number = self.lease.number if number is None else number
        self.leases.on_gone("p0", Gone(handoff=1, lease=number, reason="transport", again=again), now)

    def cut(self, now: float = 0.0) -> None:
        """The connection is lost."""
        self.peers.closed(self.peers.open["p0"].number)
        self.leases.link_lost("p0", now)

    def connect(self, now: float = 0.0) -> None:
        """Another connection is opened."""
        self.link("p0", ADDRESS)
        self.leases.link_opened(ADDRESS, "p0", now)

    def reach(self, state: LeaseState) -> None:
        """Bring the lease of handoff 1 into a state."""
        self.claim()
        if state is LeaseState.CLAIMED:
            return
        self.reserve()
        if state is LeaseState.QUEUED:
            return
        self.grant()
        match state:
            case LeaseState.PREPARING:
                self.first()
                crcs = bytes(12)
                self.landed(sums=[HeadSums(target_rank=0, head=0, num_heads=1, crcs=crcs)])
            case LeaseState.LANDED:
                self.first()
                self.landed()
            case LeaseState.REVOKED:
                self.leases.cancel(1, 0.0)
            case LeaseState.QUARANTINED:
                self.cut()
        assert self.lease.state is state
        if "p0" in self.peers.open:
            self.sent("p0")
