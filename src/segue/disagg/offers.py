"""The offers of a worker: what requests, decode workers, ranks and the clock do to them.

:class:`Offers` checks each message and turns it into an event; `segue.disagg.offer_machine` applies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from segue.disagg.offer import (
    ALIVE_S,
    EARLY_CLAIM_S,
    MAX_EARLY_CLAIMS,
    PUSH_S,
    UNCLAIMED_S,
    HeldPages,
    Offer,
    OfferEvent,
    OfferPort,
    OfferState,
)
from segue.disagg.offer_machine import OfferMachine
from segue.disagg.peers import Peers, ProtocolViolation
from segue.disagg.recent import RecentHandovers, note
from segue.messages.kv import Claim, First, Gone, Grant, KVIdentity, Pushed, PushEnded, Revoke
from segue.messages.requests import TokenLogprob, unpack_ids
from segue.sizes import ceil_div


class Offers:
    """All offers of a worker. Methods that take ``now`` may send messages and commands through ``peers``."""

    def __init__(self, source: OfferPort, peers: Peers, *, page_size: int, num_ranks: int) -> None:
        """``num_ranks`` tensor-parallel ranks push each page, each its own heads of it."""
        self._machine = OfferMachine(source, peers, page_size=page_size, num_ranks=num_ranks)
        self._peers = peers
        self._page_size = page_size
        self._early: dict[int, tuple[str, Claim, float]] = {}  # handoff -> (incarnation, claim, until)

    @property
    def by_handoff(self) -> dict[int, Offer]:
        """The offers that have not ended, by their handoff."""
        return self._machine.by_handoff

    @property
    def num_sent(self) -> int:
        """The number of offers whose pages were all sent."""
        return self._machine.num_sent

    @property
    def num_pages_sent(self) -> int:
        """The pages of these offers."""
        return self._machine.num_pages_sent

    def num_open(self, now: float) -> int:
        """Returns the number of offers that live, or whose first token a decode worker may still ask for.

        A first token that ends its request also ends the offer, perhaps before the claim comes.
        """
        return len(self.by_handoff) + sum(
            ended.first is not None and not ended.is_told and now < ended.ended_at + UNCLAIMED_S
            for ended in self._machine.ended.values()
        )

    @property
    def recent(self) -> RecentHandovers:
        """The offers that ended last."""
        return self._machine.recent

    def __iter__(self) -> Iterator[Offer]:
        return iter(self.by_handoff.values())

    def holds(self) -> Iterator[tuple[Offer, HeldPages]]:
        """Yields all pages and locks that offers own."""
        for offer in self:
            if offer.source is not None:
                yield offer, offer.source
            yield from ((offer, hold) for hold in offer.draining)

    # --- what the request does ---

    def add(self, handoff: int, rid: str, num_tokens: int, prompt_hash: bytes, now: float) -> None:
        """Begin an offer; its handoff must be new (see `is_known`)."""
        assert not self.is_known(handoff)
        self.by_handoff[handoff] = offer = Offer(
            handoff=handoff, rid=rid, num_tokens=num_tokens, prompt_hash=prompt_hash
        )
        note(offer.events, "begin", now)
        if (early := self._early.pop(handoff, None)) is not None:
            self.on_claim(early[0], early[1], now)

    def is_known(self, handoff: int) -> bool:
        """Whether an offer of this handoff lives, or has ended lately."""
        return handoff in self.by_handoff or handoff in self._machine.ended

    def launched(self, handoff: int, tokens: int, step: int, identity: KVIdentity, now: float) -> None:
        """Note that steps up to ``step`` compute the KV of the first ``tokens`` tokens."""
        if (offer := self.by_handoff.get(handoff)) is not None:
            offer.launched, offer.after_step = tokens, step
            if identity not in offer.identities:
                offer.identities.append(identity)
            self._machine.apply(offer, OfferEvent.LAUNCHED, now)

    def computed(self, handoff: int, tokens: int, now: float) -> None:
        """Note that the KV of the first ``tokens`` tokens is computed."""
        if (offer := self.by_handoff.get(handoff)) is not None:
            note(offer.events, "computed", now, tokens)

    def committed(self, identity: KVIdentity) -> None:
        """Note that other weights are served: they compute the rest of each prompt that has begun."""
        for offer in self:
            if 0 < offer.launched < offer.num_tokens and identity not in offer.identities:
                offer.identities.append(identity)

    def step_ended(self, step: int, now: float) -> None:
        """Note that a step has ended: pushes that have waited for it begin."""
        self._machine.ended_step = step
        for offer in self:
            if offer.pushes and offer.after_step == step:
                offer.draining_since, offer.deadline = now, min(offer.deadline, now + PUSH_S)

    def add_logprobs(self, handoff: int, entries: list[TokenLogprob]) -> None:
        """Keep logprobs of prompt tokens, which the decode worker gets before the first token."""
        if (offer := self.by_handoff.get(handoff)) is not None:
            offer.logprobs += entries

    def first(self, first: First, now: float) -> None:
        """Note the first token; call this before the request ends with it."""
        if (offer := self.by_handoff.get(first.handoff)) is not None:
            offer.first = first
            self._machine.apply(
                offer, OfferEvent.FIRST if first.finished is None else OfferEvent.FINISHED, now
            )

    def take_over(self, handoff: int, hold: HeldPages) -> bool:
        """Take over the pages that a request gives up, if they are handed over or a push still reads them.

        Returns whether the offer has taken them; otherwise the caller frees them.
        """
        offer = self.by_handoff.get(handoff)
        if offer is None:
            return False
        if offer.first is not None and offer.first.finished is None and offer.is_alive:
            offer.source = hold
        elif offer.pushes and not offer.draining:
            offer.draining.append(hold)
        else:
            return False
        return True

    def request_ended(self, handoff: int, now: float) -> None:
        """Note that the request has ended, with its first token or without."""
        if (offer := self.by_handoff.get(handoff)) is not None:
            offer.is_alive = False
            if offer.first is None:
                self._machine.apply(offer, OfferEvent.ABORTED, now)

    def retracted(self, handoff: int, now: float) -> None:
        """Note that the request has given up its KV, and will compute it again."""
        if (offer := self.by_handoff.get(handoff)) is not None:
            offer.launched, offer.identities = 0, []
            self._machine.apply(offer, OfferEvent.RETRACTED, now)

    def withdraw_all(self, now: float) -> None:
        """Free the pages of ended requests: at once, or when the last push that reads them has ended."""
        for offer in [offer for offer in self if not offer.is_alive]:
            self._machine.apply(offer, OfferEvent.WITHDRAWN, now)

    # --- what decode workers and ranks do ---

    def on_claim(self, incarnation: str, claim: Claim, now: float) -> None:
        """A decode worker asks for a handoff's KV."""
        offer = self.by_handoff.get(claim.handoff)
        if offer is None:
            self._claim_unknown(incarnation, claim, now)
        elif claim.prompt_hash != offer.prompt_hash:
            self._refuse_prompt(incarnation, claim)
        elif self._peers.open[incarnation].is_suspect:
            self._machine.refuse(incarnation, claim.handoff, "suspect")
        elif incarnation == offer.next_claimant or (incarnation == offer.claimant and not offer.lease_ends):
            return  # its claim stands already: the two sides' messages have crossed
        elif offer.claimant is None:
            offer.claimant, offer.first_sent = incarnation, False
            self._machine.settle(offer, now)
        elif offer.next_claimant is None:
            # A router may know before this worker that the decode worker of the claim that stands is lost.
            offer.next_claimant = incarnation
        else:
            self._machine.refuse(incarnation, claim.handoff, "taken")

    def _claim_unknown(self, incarnation: str, claim: Claim, now: float) -> None:
        """Answer a claim that has no offer by what is remembered; else keep it until its request comes."""
        if (ended := self._machine.ended.get(claim.handoff)) is not None:
            if claim.prompt_hash != ended.prompt_hash:
                self._refuse_prompt(incarnation, claim)
                return
            if ended.first is not None:
                self._machine.send_first(incarnation, ended.first, ended.logprobs)
                self._machine.ended[claim.handoff] = replace(ended, is_told=True)
            self._machine.refuse(incarnation, claim.handoff, ended.reason)
        elif claim.handoff in self._early or len(self._early) >= MAX_EARLY_CLAIMS:
            self._machine.refuse(incarnation, claim.handoff, "unknown")
        else:
            self._early[claim.handoff] = incarnation, claim, now + EARLY_CLAIM_S

    def _refuse_prompt(self, incarnation: str, claim: Claim) -> None:
        text = f"the prompt of request {claim.rid} differs from the one that was computed for its handoff"
        self._machine.refuse(incarnation, claim.handoff, "prompt_differs", text)

    def on_grant(self, incarnation: str, grant: Grant, now: float) -> None:
        """A decode worker grants pages; a grant for an earlier lease is ignored."""
        offer = self.by_handoff.get(grant.handoff)
        if offer is None or offer.claimant != incarnation or not offer.lease or offer.lease != grant.lease:
            return
        if len(grant.pages) % 4:
            raise ProtocolViolation(
                f"Grant for handoff {grant.handoff} has {len(grant.pages)} bytes of page ids of 4 bytes"
            )
        targets = unpack_ids(grant.pages)
        num_pages = ceil_div(offer.num_tokens, self._page_size)
        if offer.state is OfferState.CLAIMED:
            if not 0 <= grant.first_page <= num_pages or grant.first_page + len(targets) != num_pages:
                raise ProtocolViolation(
                    f"Grant for handoff {grant.handoff} has {len(targets)} pages from page {grant.first_page}"
                    f" on, but the prompt has {num_pages} pages"
                )
            offer.session = self._peers.open[incarnation].session
            offer.first_page, offer.targets, offer.num_posted = grant.first_page, targets, 0
            offer.sums = {}
        self._machine.apply(offer, OfferEvent.GRANT, now)

    def on_revoke(self, incarnation: str, revoke: Revoke, now: float) -> None:
        """A decode worker gives up a lease, or with ``final`` the whole handoff."""
        if (early := self._early.get(revoke.handoff)) is not None and early[0] == incarnation:
            del self._early[revoke.handoff]
        offer = self.by_handoff.get(revoke.handoff)
        if offer is None or (offer.claimant, offer.lease) != (incarnation, revoke.lease):
            self._confirm_gone(incarnation, revoke)
        if offer is None:
            return
        if offer.next_claimant == incarnation and revoke.final:
            offer.next_claimant = None
        if offer.claimant != incarnation or not (revoke.final or revoke.lease == offer.lease):
            return
        last = revoke.final and offer.next_claimant is None
        self._machine.apply(offer, OfferEvent.REVOKE_FINAL if last else OfferEvent.REVOKE, now)

    def _confirm_gone(self, incarnation: str, revoke: Revoke) -> None:
        """Repeat the last word on a lease that has ended: a lost connection may have dropped it."""
        if revoke.lease:
            message = Gone(handoff=revoke.handoff, lease=revoke.lease, reason="withdrawn")
            self._peers.send(incarnation, message)

    def push_ended(self, event: PushEnded, now: float) -> None:
        """A rank has written no more for a push since ``event.at``, which is known ``now``."""
        ticket, error = event.ticket, event.error
        offer = self._machine.by_ticket.get(ticket)
        if offer is None:
            return
        for sums in event.sums:
            heads = sums.target_rank, sums.head, sums.num_heads
            offer.sums.setdefault(heads, {})[ticket] = sums.crcs
        offer.pushes[ticket] -= 1
        if not offer.pushes[ticket]:
            del offer.pushes[ticket], self._machine.by_ticket[ticket]
            note(offer.events, "pushed", event.at)
            if offer.state is OfferState.SENDING:
                offer.deadline = self._machine.push_deadline(offer, now) if offer.pushes else inf
        if error:
            self._machine.apply(offer, OfferEvent.FAILED, now)
        else:
            self._machine.settle(offer, now)

    def link_lost(self, incarnation: str, now: float) -> None:
        """The connection to a decode worker is lost."""
        self._early = {h: early for h, early in self._early.items() if early[0] != incarnation}
        for offer in list(self):
            if offer.next_claimant == incarnation:
                offer.next_claimant = None
            if offer.claimant == incarnation:
                self._machine.apply(offer, OfferEvent.LINK_LOST, now)

    # --- time ---

    @property
    def next_deadline(self) -> float:
        """When `expire` must be called; infinite: never."""
        times = [offer.deadline for offer in self]
        times += [until for _, _, until in self._early.values()]
        return min([self._machine.alive_at, *times])

    def expire(self, now: float) -> None:
        """Apply all deadlines that have passed."""
        for offer in [offer for offer in self if now >= offer.deadline]:
            self._machine.apply(offer, OfferEvent.EXPIRED, now)
        for handoff, (incarnation, _, until) in list(self._early.items()):
            if now >= until:
                del self._early[handoff]
                self._machine.refuse(incarnation, handoff, "unknown")
        ended = self._machine.ended
        while ended and now >= (oldest := next(iter(ended.items())))[1].until:
            del ended[oldest[0]]
        if now >= self._machine.alive_at:
            self._report_progress(now)

    def _report_progress(self, now: float) -> None:
        """Tell decode workers that their leases live, however long the next chunk takes."""
        sending = [offer for offer in self if offer.state is OfferState.SENDING]
        for offer in sending:
            assert offer.claimant is not None
            posted = Pushed(handoff=offer.handoff, lease=offer.lease, pages=offer.num_posted)
            self._peers.send(offer.claimant, posted)
        self._machine.alive_at = now + ALIVE_S if sending else inf
