"""Bugs that are planted into handing over, one at a time, to see that the simulated cluster finds them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from msgspec import structs

from segue.disagg.lease import LeaseEvent, LeaseState
from segue.disagg.lease_machine import LEASE, LeaseMachine
from segue.disagg.leases import Leases
from segue.disagg.offer import Offer, OfferEvent, OfferState
from segue.disagg.offer_machine import OFFER, OfferMachine
from segue.disagg.offers import Offers
from segue.messages.kv import Claim, PushPages
from segue.scheduler import adoption
from segue.scheduler.adoption import Adoption
from segue.scheduler.handover import Handover
from segue.scheduler.role import RoleControl

Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


PIECE_BUGS: dict[str, Callable[[Patch], None]] = {}  # those that show where pages come in pieces


def piece_bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Add a bug to the list of those that show where pages come in pieces."""
    PIECE_BUGS[plant.__name__] = plant
    return plant


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Add a bug to the list, under its function's name."""
    BUGS[plant.__name__] = plant
    return plant


@bug
def pages_of_an_aborted_request_are_freed_while_pushes_read_them(patch: Patch) -> None:
    takes = Offers.take_over

    def takes_nothing(self: Offers, handoff: int, hold: Any) -> bool:
        offer = self.by_handoff.get(handoff)
        return offer is not None and offer.first is not None and takes(self, handoff, hold)

    patch.setattr(Offers, "take_over", takes_nothing)


@bug
def a_second_claim_takes_the_first_ones_lease(patch: Patch) -> None:
    on_claim = Offers.on_claim

    def steal(self: Offers, incarnation: str, claim: Claim, now: float) -> None:
        offer = self.by_handoff.get(claim.handoff)
        if offer is not None and offer.state is OfferState.SENDING and offer.claimant != incarnation:
            offer.claimant = incarnation
        on_claim(self, incarnation, claim, now)

    patch.setattr(Offers, "on_claim", steal)


@bug
def the_message_sent_goes_out_while_pushes_run(patch: Patch) -> None:
    settle = OfferMachine.settle

    def hasty(self: OfferMachine, offer: Offer, now: float) -> None:
        if offer.state is OfferState.SENDING and offer.first is not None:
            if offer.num_posted == len(offer.targets):
                self.apply(offer, OfferEvent.COMPLETE, now)
        else:
            settle(self, offer, now)

    patch.setattr(OfferMachine, "settle", hasty)


@bug
def the_message_gone_goes_out_while_pushes_run(patch: Patch) -> None:
    patch.setitem(
        OFFER[OfferState.SENDING],
        OfferEvent.REVOKE_FINAL,
        (OfferState.ENDED, (OfferMachine._set_final, OfferMachine._gone, OfferMachine._end)),
    )


@bug
def a_retracted_prompt_is_offered_again_while_pushes_run(patch: Patch) -> None:
    actions = (
        OfferMachine._set_again,
        OfferMachine._gone,
        OfferMachine._drop_holds,
        OfferMachine._await_claim,
    )
    patch.setitem(OFFER[OfferState.SENDING], OfferEvent.RETRACTED, (OfferState.OPEN, actions))


@bug
def pages_are_freed_when_their_request_ends(patch: Patch) -> None:
    patch.setitem(
        LEASE[LeaseState.GRANTED],
        LeaseEvent.UNWANTED,
        (LeaseState.ENDED, (LeaseMachine._revoke_final, LeaseMachine._free)),
    )


@bug
def pages_are_freed_when_the_link_is_lost(patch: Patch) -> None:
    patch.setitem(
        LEASE[LeaseState.GRANTED],
        LeaseEvent.LINK_LOST,
        (LeaseState.ENDED, (LeaseMachine._free, LeaseMachine._give_up)),
    )


@bug
def leases_keep_no_place_among_the_running_requests(patch: Patch) -> None:
    patch.setattr(Handover, "num_places", 0)


@bug
def kv_of_any_weights_is_adopted(patch: Patch) -> None:
    patch.setattr(adoption, "_fits", lambda lease, here: True)


@bug
def kv_of_weights_that_are_not_served_yet_is_adopted(patch: Patch) -> None:
    fits = adoption._fits

    def hasty(lease: Any, here: Any) -> bool | None:
        is_newer = int(lease.sent.identities[-1].version) > int(here.version)
        return False if is_newer else fits(lease, here)

    patch.setattr(adoption, "_fits", hasty)


@bug
def kv_of_newer_weights_waits_for_ever(patch: Patch) -> None:
    patch.setitem(LEASE[LeaseState.LANDED], LeaseEvent.NEWER, (LeaseState.AHEAD, ()))
    patch.setitem(LEASE[LeaseState.AHEAD], LeaseEvent.COMMITTED, (LeaseState.AHEAD, ()))


@bug
def pages_that_wait_for_weights_are_forgotten(patch: Patch) -> None:
    patch.setitem(LEASE[LeaseState.AHEAD], LeaseEvent.UNWANTED, (LeaseState.ENDED, ()))
    patch.setitem(LEASE[LeaseState.AHEAD], LeaseEvent.SILENT, (LeaseState.ENDED, (LeaseMachine._give_up,)))


@bug
def pages_that_differ_from_their_checksums_are_used(patch: Patch) -> None:
    patch.setitem(LEASE[LeaseState.GRANTED], LeaseEvent.SENT_RAW, (LeaseState.LANDED, ()))


@piece_bug
def pieces_that_are_not_in_order_are_used(patch: Patch) -> None:
    patch.setitem(LEASE[LeaseState.GRANTED], LeaseEvent.SENT_RAW, (LeaseState.LANDED, ()))


@piece_bug
def pages_are_freed_while_their_pieces_are_put_in_order(patch: Patch) -> None:
    for event in (LeaseEvent.UNWANTED, LeaseEvent.WANTED_BACK):
        _, actions = LEASE[LeaseState.PREPARING][event]
        freed = (LeaseState.ENDED, (LeaseMachine._free, *actions))
        patch.setitem(LEASE[LeaseState.PREPARING], event, freed)
    row: Any = {event: (LeaseState.ENDED, ()) for event in (LeaseEvent.PREPARED, LeaseEvent.UNUSABLE)}
    patch.setitem(LEASE, LeaseState.ENDED, row)  # the answers that still come are ignored


@piece_bug
def pages_that_were_dropped_are_forgotten(patch: Patch) -> None:
    patch.setitem(LEASE[LeaseState.DROPPED], LeaseEvent.PREPARED, (LeaseState.ENDED, ()))


@bug
def pages_that_differ_are_forgotten(patch: Patch) -> None:
    row = LeaseState.ENDED, (LeaseMachine._give_up,)
    patch.setitem(LEASE[LeaseState.PREPARING], LeaseEvent.UNUSABLE, row)


@bug
def kv_of_two_weights_is_shared(patch: Patch) -> None:
    fits = adoption._fits
    patch.setattr(adoption, "_fits", lambda lease, here: None if fits(lease, here) is None else True)


@bug
def a_page_is_pushed_before_it_is_full(patch: Patch) -> None:
    push = OfferMachine._push

    def push_more(self: OfferMachine, offer: Offer, now: float) -> None:
        launched, size = offer.launched, self._page_size
        offer.launched = min(offer.num_tokens, -(-launched // size) * size)
        push(self, offer, now)
        offer.launched = launched

    patch.setattr(OfferMachine, "_push", push_more)


@bug
def a_push_does_not_wait_for_its_step(patch: Patch) -> None:
    push = OfferMachine._push

    def push_early(self: OfferMachine, offer: Offer, now: float) -> None:
        count = len(self._peers.commands)
        push(self, offer, now)
        self._peers.commands[count:] = [
            structs.replace(command, after_step=command.after_step - 1)
            for command in self._peers.commands[count:]
            if isinstance(command, PushPages)
        ]

    patch.setattr(OfferMachine, "_push", push_early)


@bug
def the_first_token_is_taken_twice(patch: Patch) -> None:
    on_first = Leases.on_first

    def forget(self: Leases, incarnation: str, message: Any, now: float) -> None:
        if (lease := self.active.get(message.handoff)) is not None:
            lease.first = None
        on_first(self, incarnation, message, now)

    tell = OfferMachine._tell_first

    def tell_twice(self: OfferMachine, offer: Offer, now: float) -> None:
        tell(self, offer, now)
        offer.first_sent = False

    patch.setattr(Leases, "on_first", forget)
    patch.setattr(OfferMachine, "_tell_first", tell_twice)
    for state, events in OFFER.items():  # the table has the functions themselves
        for event, (to, actions) in events.items():
            actions = tuple(tell_twice if action is tell else action for action in actions)
            patch.setitem(OFFER[state], event, (to, actions))


@bug
def an_offer_that_nobody_claims_stays_for_ever(patch: Patch) -> None:
    def never(self: OfferMachine, offer: Offer, now: float) -> None:
        offer.deadline = inf

    patch.setitem(OFFER[OfferState.OPEN], OfferEvent.FIRST, (OfferState.OPEN, (never,)))


@bug
def pages_that_only_pushes_read_are_forgotten(patch: Patch) -> None:
    def forget(self: OfferMachine, offer: Offer, now: float) -> None:
        offer.draining = []

    patch.setitem(
        OFFER[OfferState.DRAINING],
        OfferEvent.DRAINED,
        (OfferState.OPEN, (OfferMachine._gone, forget, OfferMachine._await_claim)),
    )


@bug
def pages_of_a_lease_that_begins_again_are_forgotten(patch: Patch) -> None:
    def forget(self: LeaseMachine, lease: Any, now: float) -> None:
        lease.hold, lease.number = None, 0

    patch.setitem(LEASE[LeaseState.GRANTED], LeaseEvent.GONE_AGAIN, (LeaseState.CLAIMED, (forget,)))


@bug
def pages_stay_in_quarantine(patch: Patch) -> None:
    patch.setitem(LEASE[LeaseState.QUARANTINED], LeaseEvent.LINK_BACK, (LeaseState.QUARANTINED, ()))
    patch.setattr(Leases, "writers_gone", lambda self, session, now: None)


@bug
def a_role_is_entered_while_offers_live(patch: Patch) -> None:
    patch.setattr(Offers, "num_open", lambda self, now: 0)


@bug
def a_role_is_entered_while_leases_live(patch: Patch) -> None:
    left = RoleControl._left
    patch.setattr(RoleControl, "_left", lambda self: left(self) | {"leases": 0})


@bug
def a_role_is_entered_while_requests_run(patch: Patch) -> None:
    left = RoleControl._left
    patch.setattr(RoleControl, "_left", lambda self: left(self) | {"requests": 0})


@bug
def work_that_goes_is_still_taken(patch: Patch) -> None:
    def check(self: RoleControl, handoff: Any, most_outputs: int) -> None:
        pass

    patch.setattr(RoleControl, "check", check)


@bug
def a_role_change_has_no_end(patch: Patch) -> None:
    due = RoleControl.due

    def patient(self: RoleControl, now: float) -> Any:
        self._until = inf
        return due(self, now)

    patch.setattr(RoleControl, "due", patient)


@bug
def an_adopted_request_is_not_announced(patch: Patch) -> None:
    patch.setattr(Adoption, "announce", lambda self, step: None)
