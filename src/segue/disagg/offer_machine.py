"""Applies the table of an offer's states and events: what is sent, pushed and freed in each transition.

:data:`OFFER` is the table of all states and events; :class:`OfferMachine` applies it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from segue.disagg.offer import (
    ALIVE_S,
    GRANT_S,
    LOGPROBS_PER_PART,
    PUSH_S,
    REMEMBERED_S,
    STUCK_S,
    UNCLAIMED_S,
    EndedOffer,
    Offer,
    OfferEvent,
    OfferPort,
    OfferState,
)
from segue.disagg.peers import Peers, ProtocolViolation
from segue.disagg.recent import RecentHandovers, note
from segue.messages.kv import (
    First,
    Gone,
    GoneReason,
    HeadSums,
    PromptLogprobs,
    PushPages,
    ReservePages,
    Sent,
)
from segue.messages.requests import TokenLogprob
from segue.sizes import ceil_div


class OfferMachine:
    """All offers of a worker, and what happens to them; `Offers` says when."""

    def __init__(self, source: OfferPort, peers: Peers, *, page_size: int, num_ranks: int) -> None:
        """``num_ranks`` tensor-parallel ranks push each page, each its own heads of it."""
        self._source = source
        self._peers = peers
        self._page_size = page_size
        self._num_ranks = num_ranks
        self.by_handoff: dict[int, Offer] = {}
        self.by_ticket: dict[int, Offer] = {}
        self.ended: dict[int, EndedOffer] = {}  # by handoff, the one that ended first at the beginning
        self.alive_at = inf  # when the progress of leases is reported next
        self.ended_step = 0  # number of the last step that has ended
        self.num_sent = 0  # offers whose pages were all sent
        self.num_pages_sent = 0  # their pages
        self.recent = RecentHandovers("prefill")
        self._num_leases = 0
        self._num_tickets = 0

    def apply(self, offer: Offer, event: OfferEvent, now: float) -> None:
        """Apply one event: enter the table's next state, and do what the table says."""
        note(offer.events, event.name.lower(), now, offer.launched if event is OfferEvent.LAUNCHED else 0)
        offer.state, actions = OFFER[offer.state][event]
        for action in actions:
            action(self, offer, now)
        self.settle(offer, now)

    def settle(self, offer: Offer, now: float) -> None:
        """Apply the event that follows from the offer's own data, if there is one."""
        if offer.state is OfferState.OPEN and offer.claimant is not None and offer.launched:
            self.apply(offer, OfferEvent.READY, now)
        elif offer.state is OfferState.SENDING and offer.first is not None and not offer.pushes:
            if offer.num_posted == len(offer.targets):
                self.apply(offer, OfferEvent.COMPLETE, now)
        elif offer.state is OfferState.DRAINING and not offer.pushes:
            self.apply(offer, offer.next_draining(), now)

    def _reserve(self, offer: Offer, now: float) -> None:
        """Begin a lease."""
        assert offer.claimant is not None
        self._num_leases += 1
        offer.lease = self._num_leases
        offer.deadline = now + GRANT_S
        self._peers.send(
            offer.claimant,
            ReservePages(handoff=offer.handoff, lease=offer.lease, num_tokens=offer.num_tokens),
        )

    def _tell_first(self, offer: Offer, now: float) -> None:
        """Send the first token to the claimant, once."""
        if offer.first is not None and offer.claimant is not None and not offer.first_sent:
            offer.first_sent = offer.is_told = True
            self.send_first(offer.claimant, offer.first, offer.logprobs)

    def send_first(self, incarnation: str, first: First, logprobs: list[TokenLogprob]) -> None:
        for part in range(first.parts):
            entries = logprobs[part * LOGPROBS_PER_PART : (part + 1) * LOGPROBS_PER_PART]
            self._peers.send(incarnation, PromptLogprobs(handoff=first.handoff, part=part, entries=entries))
        self._peers.send(incarnation, first)

    def refuse(self, incarnation: str, handoff: int, reason: GoneReason, message: str = "") -> None:
        """Answer a claim that gets no lease."""
        self._peers.send(incarnation, Gone(handoff=handoff, lease=0, reason=reason, message=message))

    def _push(self, offer: Offer, now: float) -> None:
        """Push the pages that launched steps have filled; the last one may be filled in part."""
        if offer.launched >= offer.num_tokens:
            end = ceil_div(offer.num_tokens, self._page_size)
        else:
            end = offer.launched // self._page_size
        begin = offer.first_page + offer.num_posted
        if end <= begin:
            return
        assert offer.claimant is not None
        pages = offer.source.pages if offer.source is not None else self._source.pages(offer.rid)
        self._num_tickets += 1
        ticket = self._num_tickets
        if not offer.pushes:
            offer.deadline = self.push_deadline(offer, now)
        offer.pushes[ticket] = self._num_ranks
        self.by_ticket[ticket] = offer
        self._peers.commands.append(
            PushPages(
                ticket=ticket,
                session=offer.session,
                sources=list(pages[begin:end]),
                targets=offer.targets[offer.num_posted : end - offer.first_page],
                after_step=offer.after_step,
            )
        )
        offer.num_posted = end - offer.first_page
        note(offer.events, "posted", now, offer.num_posted)

    def push_deadline(self, offer: Offer, now: float) -> float:
        """Returns when a push that now is the oldest must have ended; infinite: its step still runs."""
        return now + PUSH_S if offer.after_step <= self.ended_step else inf

    def _sent(self, offer: Offer, now: float) -> None:
        """Send `Sent`, the last word on a lease whose pages are all written."""
        assert offer.claimant is not None and offer.identities
        sent = Sent(
            handoff=offer.handoff,
            lease=offer.lease,
            pages=len(offer.targets),
            identities=offer.identities,
            sums=[_joined(heads, crcs) for heads, crcs in offer.sums.items()],
        )
        self._peers.send(offer.claimant, sent)
        self.num_sent += 1
        self.num_pages_sent += len(offer.targets)
        self._drop_claim(offer, now)

    def _gone(self, offer: Offer, now: float) -> None:
        """Send `Gone`, the last word on a lease that failed. The claim stands if the KV is computed again."""
        assert offer.claimant is not None
        again = offer.again and offer.next_draining() is OfferEvent.DRAINED
        message = Gone(handoff=offer.handoff, lease=offer.lease, reason=offer.reason, again=again)
        self._peers.send(offer.claimant, message)
        if (peer := self._peers.open.get(offer.claimant)) is not None:
            peer.is_suspect = any(
                self._is_stuck(other, now) for other in self.by_handoff.values() if other is not offer
            )
        offer.lease, offer.again = 0, False
        if not again:
            self._drop_claim(offer, now)

    def _is_stuck(self, offer: Offer, now: float) -> bool:
        has_begun = offer.after_step <= self.ended_step
        return offer.state is OfferState.DRAINING and has_begun and now >= offer.draining_since + PUSH_S

    def _drop_claim(self, offer: Offer, now: float) -> None:
        """End a claim; the one that waits for its end takes its place."""
        offer.claimant, offer.next_claimant = offer.next_claimant, None
        offer.lease, offer.first_sent = 0, False

    def _await_claim(self, offer: Offer, now: float) -> None:
        """Set the time that pages wait for a claim, once the first token is known."""
        offer.deadline = inf if offer.first is None else now + UNCLAIMED_S

    def _begin_sending(self, offer: Offer, now: float) -> None:
        offer.deadline = inf  # until a push is posted
        self.alive_at = min(self.alive_at, now + ALIVE_S)
        self._push(offer, now)

    def _begin_draining(self, offer: Offer, now: float) -> None:
        offer.draining_since, offer.deadline = now, self.push_deadline(offer, now)

    def _set_again(self, offer: Offer, now: float) -> None:
        """The request computes its KV again: the claim stands."""
        offer.again, offer.reason = True, "retracted"

    def _clear_again(self, offer: Offer, now: float) -> None:
        """The claim ends with this lease."""
        offer.again = False

    def _set_final(self, offer: Offer, now: float) -> None:
        """The offer ends when it has drained."""
        offer.final, offer.again = True, False

    def _withdraw(self, offer: Offer, now: float) -> None:
        """Keep the pages only as long as pushes read them."""
        if offer.source is not None:
            offer.draining.append(offer.source)
            offer.source = None

    def _tell_again(self, offer: Offer, now: float) -> None:
        """Send the first token, if the claim stands."""
        if offer.again:
            self._tell_first(offer, now)

    def _suspect(self, offer: Offer, now: float) -> None:
        """A push is stuck: the pair gets no new lease; later its connection is closed."""
        assert offer.claimant is not None
        if now >= offer.draining_since + STUCK_S:
            offer.deadline = inf
            text = f"a push for handoff {offer.handoff} has been stuck for {STUCK_S:.0f} s"
            self._peers.close(offer.claimant, text)
            return
        offer.deadline = offer.draining_since + STUCK_S
        if (peer := self._peers.open.get(offer.claimant)) is not None:
            peer.is_suspect = True

    def _drop_holds(self, offer: Offer, now: float) -> None:
        """Give back the pages that only pushes read."""
        for hold in offer.draining:
            self._source.release(hold)
        offer.draining, offer.targets, offer.num_posted, offer.sums = [], [], 0, {}

    def _end(self, offer: Offer, now: float) -> None:
        """End the offer: its pages go back, and its end is remembered."""
        while offer.claimant is not None:  # a claim without a lease
            self._tell_first(offer, now)
            self.refuse(offer.claimant, offer.handoff, offer.reason)
            self._drop_claim(offer, now)
        self._drop_holds(offer, now)
        if offer.source is not None:
            self._source.release(offer.source)
        del self.by_handoff[offer.handoff]
        self.recent.add(offer)
        self.ended[offer.handoff] = EndedOffer(
            until=now + REMEMBERED_S,
            prompt_hash=offer.prompt_hash,
            reason=offer.reason,
            first=offer.first,
            logprobs=offer.logprobs,
            is_told=offer.is_told,
            ended_at=now,
        )

    def _violation(self, offer: Offer, now: float) -> None:
        raise ProtocolViolation(f"Grant for lease {offer.lease}, whose pages have been granted")


def _joined(heads: tuple[int, int, int], crcs: dict[int, bytes]) -> HeadSums:
    """Returns the checksums of all pushes of a lease; tickets grow with the pages."""
    target_rank, head, num_heads = heads
    joined = b"".join(crcs[ticket] for ticket in sorted(crcs))
    return HeadSums(target_rank=target_rank, head=head, num_heads=num_heads, crcs=joined)


Action = Callable[[OfferMachine, Offer, float], None]


def _reason(reason: GoneReason) -> Action:
    """Returns the action that sets why a lease ends."""

    def set_reason(machine: OfferMachine, offer: Offer, now: float) -> None:
        offer.reason = reason

    return set_reason


_S, _E, _M = OfferState, OfferEvent, OfferMachine


def _drain(*actions: Action) -> tuple[OfferState, tuple[Action, ...]]:
    return _S.DRAINING, (*actions, _M._begin_draining)


def _end(*actions: Action) -> tuple[OfferState, tuple[Action, ...]]:
    return _S.ENDED, (*actions, _M._end)


# State -> event -> (next state, actions). An event that is missing cannot happen in that state.
OFFER: dict[OfferState, dict[OfferEvent, tuple[OfferState, tuple[Action, ...]]]] = {
    _S.OPEN: {
        _E.READY: (_S.CLAIMED, (_M._reserve, _M._tell_first)),
        _E.REVOKE: (_S.OPEN, (_M._drop_claim,)),
        _E.REVOKE_FINAL: _end(_M._drop_claim, _reason("withdrawn")),
        _E.LAUNCHED: (_S.OPEN, ()),
        _E.FIRST: (_S.OPEN, (_M._await_claim,)),
        _E.FINISHED: _end(_reason("finished")),
        _E.ABORTED: _end(_reason("aborted")),
        _E.RETRACTED: (_S.OPEN, ()),
        _E.WITHDRAWN: _end(_reason("retracted")),
        _E.EXPIRED: _end(_reason("expired")),
        _E.LINK_LOST: (_S.OPEN, (_M._drop_claim,)),
    },
    _S.CLAIMED: {
        _E.GRANT: (_S.SENDING, (_M._begin_sending,)),
        _E.REVOKE: (_S.OPEN, (_reason("withdrawn"), _M._gone, _M._await_claim)),
        _E.REVOKE_FINAL: _end(_reason("withdrawn"), _M._gone),
        _E.LAUNCHED: (_S.CLAIMED, ()),
        _E.FIRST: (_S.CLAIMED, (_M._tell_first,)),
        _E.FINISHED: _end(_M._tell_first, _reason("finished"), _M._gone),
        _E.ABORTED: _end(_reason("aborted"), _M._gone),
        _E.RETRACTED: (_S.OPEN, (_M._set_again, _M._gone, _M._await_claim)),
        _E.WITHDRAWN: _end(_reason("retracted"), _M._gone),
        _E.EXPIRED: (_S.OPEN, (_reason("expired"), _M._gone, _M._await_claim)),
        _E.LINK_LOST: (_S.OPEN, (_M._drop_claim, _M._await_claim)),
    },
    _S.SENDING: {
        _E.GRANT: (_S.SENDING, (_M._violation,)),
        _E.REVOKE: _drain(_reason("withdrawn")),
        _E.REVOKE_FINAL: _drain(_reason("withdrawn"), _M._set_final),
        _E.LAUNCHED: (_S.SENDING, (_M._push,)),
        _E.FIRST: (_S.SENDING, (_M._tell_first,)),
        _E.FINISHED: _drain(_M._tell_first, _reason("finished"), _M._set_final),
        _E.COMPLETE: _end(_M._sent, _reason("taken")),
        _E.FAILED: _drain(_reason("transport")),
        _E.ABORTED: _drain(_reason("aborted")),
        _E.RETRACTED: _drain(_M._set_again),
        _E.WITHDRAWN: _drain(_reason("retracted"), _M._withdraw),
        _E.EXPIRED: _drain(_reason("expired")),
        _E.LINK_LOST: _drain(_reason("link")),
    },
    _S.DRAINING: {
        _E.GRANT: (_S.DRAINING, ()),
        _E.REVOKE: (_S.DRAINING, (_M._clear_again,)),
        _E.REVOKE_FINAL: (_S.DRAINING, (_M._set_final,)),
        _E.LAUNCHED: (_S.DRAINING, ()),
        _E.FIRST: (_S.DRAINING, (_M._tell_again,)),
        _E.FINISHED: (_S.DRAINING, (_M._tell_again, _reason("finished"))),
        _E.FAILED: (_S.DRAINING, ()),
        _E.ABORTED: (_S.DRAINING, (_reason("aborted"),)),
        _E.RETRACTED: (_S.DRAINING, ()),
        _E.WITHDRAWN: (_S.DRAINING, (_M._withdraw,)),
        _E.EXPIRED: (_S.DRAINING, (_M._suspect,)),
        _E.LINK_LOST: (_S.DRAINING, (_M._clear_again,)),
        _E.DRAINED: (_S.OPEN, (_M._gone, _M._drop_holds, _M._await_claim)),
        _E.DRAINED_LAST: _end(_M._gone),
    },
}
