"""Offers, one event at a time."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from segue.disagg.offer import (
    EARLY_CLAIM_S,
    GRANT_S,
    MAX_EARLY_CLAIMS,
    PUSH_S,
    REMEMBERED_S,
    STUCK_S,
    UNCLAIMED_S,
    OfferEvent,
    OfferState,
)
from segue.disagg.offer_machine import OFFER
from segue.disagg.peers import ProtocolViolation
from segue.messages.kv import Claim, First, Gone, Grant, Pushed, PushEnded, ReservePages, Revoke, Sent
from tests.disagg.sides import HASH, PrefillSide

# Events that cannot happen in a state, and why.
IMPOSSIBLE = {
    "OPEN": {
        "GRANT": "there is no lease, and a grant for none is ignored",
        "COMPLETE": "nothing is granted",
        "FAILED": "no push runs",
        "DRAINED": "it does not drain",
        "DRAINED_LAST": "it does not drain",
    },
    "CLAIMED": {
        "READY": "it has a lease",
        "COMPLETE": "nothing is granted",
        "FAILED": "no push runs",
        "DRAINED": "it does not drain",
        "DRAINED_LAST": "it does not drain",
    },
    "SENDING": {
        "READY": "it has a lease",
        "DRAINED": "it does not drain",
        "DRAINED_LAST": "it does not drain",
    },
    "DRAINING": {"READY": "it has a lease", "COMPLETE": "the lease is given up"},
}


@pytest.fixture
def side() -> PrefillSide:
    return PrefillSide()


def kinds(messages: list[Any]) -> list[type]:
    return [type(message) for message in messages]


def test_every_event_has_a_row_in_every_state_or_cannot_happen() -> None:
    for state in set(OfferState) - {OfferState.ENDED}:
        rows = {event.name for event in OFFER[state]}
        assert rows & set(IMPOSSIBLE[state.name]) == set()
        assert rows | set(IMPOSSIBLE[state.name]) == {event.name for event in OfferEvent}, state


# --- claims ---


def test_a_claim_waits_until_the_first_chunk_is_launched(side: PrefillSide) -> None:
    side.begin()
    side.claim()
    assert side.sent("d0") == []
    side.launch(4)
    assert side.sent("d0") == [ReservePages(handoff=1, lease=1, num_tokens=10)]


def test_a_claim_may_come_before_its_request(side: PrefillSide) -> None:
    side.claim()
    side.begin()
    side.launch(4)
    assert kinds(side.sent("d0")) == [ReservePages]


def test_a_claim_whose_request_does_not_come_is_refused_in_the_end(side: PrefillSide) -> None:
    side.claim()
    assert side.offers.next_deadline == EARLY_CLAIM_S
    side.offers.expire(EARLY_CLAIM_S)
    assert side.sent("d0") == [Gone(handoff=1, lease=0, reason="unknown")]
    side.begin()
    side.launch(4)
    assert side.sent("d0") == []


@pytest.mark.parametrize("end", ["revoked", "lost"])
def test_a_claim_that_is_taken_back_before_its_request_comes_is_forgotten(
    side: PrefillSide, end: str
) -> None:
    side.claim()
    if end == "lost":
        side.offers.link_lost("d0", 0.0)
    else:
        side.offers.on_revoke("d0", Revoke(handoff=1, lease=0, reason="ended", final=True), 0.0)
    side.begin()
    side.launch(4)
    assert side.sent("d0") == []


def test_a_second_claim_before_the_request_is_refused(side: PrefillSide) -> None:
    side.claim("d0")
    side.claim("d1")
    assert [message.reason for message in side.sent("d1")] == ["unknown"]


def test_too_many_claims_without_requests_are_refused(side: PrefillSide) -> None:
    for handoff in range(2, MAX_EARLY_CLAIMS + 2):
        side.offers.on_claim("d0", Claim(handoff=handoff, rid="", num_tokens=1, prompt_hash=b""), 0.0)
    assert side.sent("d0") == []
    side.claim()
    assert [message.reason for message in side.sent("d0")] == ["unknown"]


def test_a_claim_for_another_prompt_is_refused(side: PrefillSide) -> None:
    side.begin()
    side.claim(prompt_hash=b"another")
    assert [message.reason for message in side.sent("d0")] == ["prompt_differs"]


@pytest.mark.parametrize("end", ["lost", "revoked"])
@pytest.mark.parametrize("state", ["OPEN", "CLAIMED", "SENDING"])
def test_a_second_claim_waits_for_the_end_of_the_first(side: PrefillSide, state: str, end: str) -> None:
    side.reach(state)
    side.claim()
    side.claim("d1")
    assert side.sent("d1") == []
    if end == "lost":
        side.offers.link_lost("d0", 0.0)
    else:
        side.revoke(final=True)
    side.end_pushes()
    side.launch(10)
    assert kinds(side.sent("d1")) == [ReservePages]


def test_a_second_claim_learns_the_first_token_if_the_first_claim_gets_all_pages(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.claim("d1")
    side.launch(10)
    side.first()
    side.end_pushes()
    messages = side.sent("d1")
    assert kinds(messages) == [First, Gone] and messages[1].reason == "taken"


def test_two_claims_without_a_lease_learn_of_the_end(side: PrefillSide) -> None:
    side.begin()
    side.claim()
    side.claim("d1")
    side.abort()
    assert [message.reason for name in ("d0", "d1") for message in side.sent(name)] == ["aborted"] * 2


@pytest.mark.parametrize("state", ["OPEN", "CLAIMED", "SENDING"])
def test_a_third_claim_is_refused(side: PrefillSide, state: str) -> None:
    side.reach(state)
    side.link("d2")
    for name in ("d0", "d1", "d2"):
        side.claim(name)
    assert [message.reason for message in side.sent("d2")] == ["taken"]


@pytest.mark.parametrize("state", ["CLAIMED", "SENDING"])
def test_a_claim_that_stands_is_not_refused(side: PrefillSide, state: str) -> None:
    side.reach(state)
    side.sent("d0")
    side.claim()
    assert side.sent("d0") == []


def test_a_suspect_decode_worker_gets_no_lease(side: PrefillSide) -> None:
    side.reach("OPEN")
    side.peers.open["d0"].is_suspect = True
    side.claim()
    assert [message.reason for message in side.sent("d0")] == ["suspect"]


def test_a_claim_while_it_drains_gets_the_next_lease(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.claim("d1")
    assert side.sent("d1") == []
    side.end_pushes()
    assert [message.lease for message in side.sent("d1")] == [2]


def test_a_claim_that_waits_for_draining_can_be_taken_back(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.claim("d1")
    side.revoke(final=True, name="d1", lease=0)
    side.end_pushes()
    assert side.sent("d1") == [] and side.state == "OPEN"


def test_only_one_claim_waits_for_draining(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.claim("d1")
    side.link("d2")
    side.claim("d2")
    assert [message.reason for message in side.sent("d2")] == ["taken"]


# --- the usual way ---


def test_pages_are_pushed_as_they_are_computed(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    side.grant()
    side.launch(6, step=2)  # half of the second page
    side.launch(10, step=3)
    pushes = side.pushes()
    assert [(p.sources, p.targets, p.after_step) for p in pushes] == [
        ([11], [21], 1),
        ([12, 13], [22, 23], 3),
    ]


def test_pages_that_the_decode_worker_has_are_not_pushed(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    side.launch(10)
    side.grant(first_page=2, pages=[23])
    assert [(push.sources, push.targets) for push in side.pushes()] == [([13], [23])]


def test_sent_comes_behind_the_last_push_and_the_first_token(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.launch(10)
    side.first()
    assert kinds(side.sent("d0")) == [First]
    side.end_pushes()
    assert kinds(side.sent("d0")) == [Sent]
    assert side.state == "ENDED" and side.port.home == [11, 12, 13] and side.offers.num_sent == 1
    side.claim("d1")
    assert [getattr(m, "reason", "") for m in side.sent("d1")] == ["", "taken"]


def test_nothing_is_sent_before_the_first_token(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.launch(10)
    side.end_pushes()
    assert side.sent("d0") == [] and side.state == "SENDING"


def test_the_claimant_gets_a_first_token_that_is_known(side: PrefillSide) -> None:
    side.reach("OPEN")
    side.launch(10)
    side.first()
    side.claim()
    assert kinds(side.sent("d0")) == [ReservePages, First]


def test_the_first_token_comes_before_pages_are_granted(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    side.launch(10)
    side.sent("d0")
    side.first()
    assert kinds(side.sent("d0")) == [First]
    assert side.state == "CLAIMED"


def test_a_lease_that_lives_is_reported(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.offers.expire(side.offers.next_deadline)
    assert side.sent("d0") == [Pushed(handoff=1, lease=1, pages=1)]
    side.offers.expire(side.offers.next_deadline)
    assert kinds(side.sent("d0")) == [Pushed]


# --- ends ---


@pytest.mark.parametrize("state", ["OPEN", "CLAIMED", "SENDING"])
def test_a_request_that_ends_with_its_first_token_hands_nothing_over(side: PrefillSide, state: str) -> None:
    side.reach(state)
    side.sent("d0")
    side.launch(10)
    side.first(finished="stop")
    if state == "SENDING":
        assert kinds(side.sent("d0")) == [First] and side.port.home == []
        side.end_pushes()
        assert [m.reason for m in side.sent("d0")] == ["finished"]
    elif state == "CLAIMED":
        messages = side.sent("d0")
        assert kinds(messages) == [First, Gone]
        assert messages[1] == Gone(handoff=1, lease=1, reason="finished")
    assert side.state == "ENDED" and side.port.home == [11, 12, 13]


@pytest.mark.parametrize(("finished", "reason"), [("stop", "finished"), (None, "expired")])
def test_a_claim_of_a_handoff_that_has_ended_gets_its_first_token(
    side: PrefillSide, finished: Any, reason: str
) -> None:
    side.reach("OPEN")
    side.launch(10)
    side.first(finished=finished)
    side.offers.expire(UNCLAIMED_S)
    side.claim()
    messages = side.sent("d0")
    assert kinds(messages) == [First, Gone] and messages[1].reason == reason


@pytest.mark.parametrize("finished", ["stop", None])
def test_a_claim_of_an_ended_handoff_for_another_prompt_gets_no_token(
    side: PrefillSide, finished: Any
) -> None:
    side.reach("OPEN")
    side.launch(10)
    side.first(finished=finished)
    side.offers.expire(UNCLAIMED_S)
    side.claim(prompt_hash=b"x" * len(HASH))
    assert [each.reason for each in side.sent("d0")] == ["prompt_differs"]
    side.claim()
    assert kinds(side.sent("d0")) == [First, Gone], "the right prompt's claim gets it still"


def test_a_handoff_that_has_ended_is_remembered_for_a_while(side: PrefillSide) -> None:
    side.reach("OPEN")
    side.abort()
    side.offers.expire(REMEMBERED_S - 1)
    assert side.offers.is_known(1)
    side.offers.expire(REMEMBERED_S)
    assert not side.offers.is_known(1)


def test_a_claim_without_a_lease_learns_of_the_end(side: PrefillSide) -> None:
    side.begin()
    side.claim()
    side.abort()
    assert side.sent("d0") == [Gone(handoff=1, lease=0, reason="aborted")]


@pytest.mark.parametrize("state", ["CLAIMED", "SENDING"])
def test_a_lease_of_an_aborted_request_ends(side: PrefillSide, state: str) -> None:
    side.reach(state)
    side.sent("d0")
    side.abort()
    if state == "SENDING":
        assert side.port.home == [] and side.state == "DRAINING", "a push still reads the pages"
        side.end_pushes()
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="aborted")]
    assert side.state == "ENDED" and side.port.home == [11, 12, 13]


def test_an_offer_that_drains_ends_with_an_aborted_request(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.retract()
    side.abort()
    side.end_pushes()
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="aborted")]
    assert side.state == "ENDED" and 11 in side.port.home


def test_an_offer_that_drains_ends_with_a_first_token_that_ends_the_request(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.first(finished="stop")
    side.end_pushes()
    assert side.state == "ENDED" and kinds(side.sent("d0")) == [Gone]
    side.claim("d1")
    assert [getattr(m, "reason", "") for m in side.sent("d1")] == ["", "finished"]


def test_nobody_claims_in_time(side: PrefillSide) -> None:
    side.reach("OPEN")
    side.launch(10)
    assert side.offers.next_deadline > REMEMBERED_S, "a prompt may take as long as it needs"
    side.first(now=5.0)
    side.offers.expire(5.0 + UNCLAIMED_S - 0.1)
    assert side.state == "OPEN"
    side.offers.expire(5.0 + UNCLAIMED_S)
    assert side.state == "ENDED" and side.port.home == [11, 12, 13]


def test_no_pages_are_granted_in_time(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    side.launch(10)
    side.first()
    side.sent("d0")
    side.offers.expire(GRANT_S)
    assert [m.reason for m in side.sent("d0")] == ["expired"]
    assert side.state == "OPEN" and side.offers.next_deadline == GRANT_S + UNCLAIMED_S
    side.claim("d1")
    assert kinds(side.sent("d1")) == [ReservePages, First], "another decode worker may have it"


def test_a_push_takes_too_long(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.offers.step_ended(1, 0.0)
    side.offers.expire(PUSH_S)
    assert side.state == "DRAINING" and [m for m in side.sent("d0") if isinstance(m, Gone)] == []
    side.end_pushes()
    assert [m.reason for m in side.sent("d0")] == ["expired"]
    assert side.state == "OPEN"


@pytest.mark.parametrize("state", ["SENDING", "DRAINING"])
def test_a_push_that_waits_for_a_long_step_has_its_time_after_it(side: PrefillSide, state: str) -> None:
    side.reach(state)
    assert side.offer.deadline == inf
    side.offers.expire(10 * STUCK_S)
    assert side.state == state and not side.peers.open["d0"].is_suspect
    side.offers.step_ended(1, 10 * STUCK_S)
    assert side.offer.deadline == 10 * STUCK_S + PUSH_S


def test_a_push_that_has_begun_is_timed_though_a_later_one_waits_for_its_step(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.offers.step_ended(1, 0.0)
    side.launch(8, step=2)
    assert len(side.offer.pushes) == 2 and side.offer.deadline == PUSH_S
    side.offers.push_ended(PushEnded(ticket=1, at=5.0), 5.0)
    assert side.offer.deadline == inf, "the other one has not begun"
    side.offers.step_ended(2, 7.0)
    assert side.offer.deadline == 7.0 + PUSH_S


def test_a_pair_with_a_stuck_push_is_suspect_and_then_closed(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.offers.step_ended(1, 0.0)
    side.offers.expire(PUSH_S)
    assert side.peers.open["d0"].is_suspect and side.peers.closes == []
    side.offers.expire(STUCK_S)
    assert [number for number, _ in side.peers.closes] == [1]
    side.end_pushes()
    assert not side.peers.open["d0"].is_suspect, "its last word has come"


def test_a_push_fails(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.end_pushes("no such page")
    assert [m.reason for m in side.sent("d0")] == ["transport"]
    assert side.state == "OPEN", "another decode worker may have it"


def test_a_push_fails_while_the_lease_drains(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.end_pushes("no such page")
    assert [m.reason for m in side.sent("d0")] == ["withdrawn"]


def test_a_request_ends_with_its_first_token_when_no_push_runs(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.launch(10)
    side.end_pushes()
    side.first(finished="stop")
    assert kinds(side.sent("d0")) == [First, Gone] and side.state == "ENDED"


def test_a_claim_that_stands_gets_a_first_token_that_ends_the_request(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.retract()
    side.launch(10, step=2)
    side.first(finished="stop")
    side.end_pushes()
    assert kinds(side.sent("d0")) == [First, Gone] and side.state == "ENDED"


@pytest.mark.parametrize(
    "end", ["revoke", "final", "failed", "abort", "retract", "withdraw", "lost", "expired", "finished"]
)
def test_a_lease_that_is_given_up_has_its_own_time_to_drain(side: PrefillSide, end: str) -> None:
    side.reach("CLAIMED")
    side.launch(10)
    side.grant()
    side.launch(10, step=2)
    side.offers.step_ended(2, 0.0)
    side.offer.pushes[99] = 1  # one of another rank
    if end == "withdraw":
        side.first()
    side.now = 5.0
    match end:
        case "revoke" | "final":
            side.revoke(final=end == "final")
        case "failed":
            side.offers.push_ended(PushEnded(ticket=1, at=side.now, error="no such page"), side.now)
        case "abort":
            side.abort()
        case "retract":
            side.retract()
        case "withdraw":
            side.offers.withdraw_all(side.now)
        case "lost":
            side.offers.link_lost("d0", side.now)
        case "expired":
            side.offers.expire(PUSH_S)
        case "finished":
            side.first(finished="stop")
    begin = PUSH_S if end == "expired" else 5.0
    assert side.state == "DRAINING"
    assert (side.offer.draining_since, side.offer.deadline) == (begin, begin + PUSH_S)


# --- revoked leases ---


def test_a_revoked_claim_without_a_lease_frees_the_offer(side: PrefillSide) -> None:
    side.begin()
    side.claim()
    side.revoke(final=True)
    assert side.sent("d0") == [] and side.state == "ENDED"
    side.claim("d1")
    assert [m.reason for m in side.sent("d1")] == ["withdrawn"]


@pytest.mark.parametrize(("final", "state"), [(False, "OPEN"), (True, "ENDED")])
def test_a_lease_that_is_revoked_before_pages_are_granted(side: PrefillSide, final: bool, state: str) -> None:
    side.reach("CLAIMED")
    side.sent("d0")
    side.revoke(final=final)
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="withdrawn")]
    assert side.state == state
    if not final:
        assert side.offer.deadline == inf, "nobody has to grant pages"


@pytest.mark.parametrize(("final", "state"), [(False, "OPEN"), (True, "ENDED")])
def test_a_lease_that_is_revoked_while_pages_are_pushed(side: PrefillSide, final: bool, state: str) -> None:
    side.reach("SENDING")
    side.revoke(final=final)
    assert side.sent("d0") == [] and side.state == "DRAINING"
    side.end_pushes()
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="withdrawn")]
    assert side.state == state


def test_a_claim_without_a_lease_is_given_up_but_not_for_good(side: PrefillSide) -> None:
    side.begin()
    side.claim()
    side.revoke(final=False)
    side.launch(4)
    assert side.sent("d0") == [] and side.state == "OPEN"


def test_a_lease_that_is_revoked_twice_ends_for_good(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.revoke(final=True)
    side.end_pushes()
    assert side.state == "ENDED"


def test_a_final_word_does_not_end_the_offer_for_who_claims_next(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.claim("d1")
    side.revoke(final=True)
    side.end_pushes()
    assert kinds(side.sent("d1")) == [ReservePages]


def test_a_word_that_is_missed_is_said_again(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.launch(10)
    side.first()
    side.end_pushes()
    side.sent("d0")
    side.revoke(final=False, lease=1)
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="withdrawn")]


def test_a_word_is_not_said_again_before_the_pushes_end(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.revoke(final=False)
    assert side.sent("d0") == []


# --- retracted requests, and pages that are wanted back ---


def test_a_retracted_prompt_is_offered_again(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    side.sent("d0")
    side.retract()
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="retracted", again=True)]
    assert side.offer.deadline == inf, "nobody has to grant pages"
    side.launch(4, step=2)
    assert [m.lease for m in side.sent("d0")] == [2], "the claim stands"


def test_a_prompt_that_is_retracted_while_pages_are_pushed(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.retract()
    assert side.port.home == [] and side.sent("d0") == []
    side.launch(4, step=2)
    assert side.pushes()[1:] == [], "the lease is given up"
    side.end_pushes()
    assert side.port.home == [11, 12, 13]
    gone, reserve = side.sent("d0")
    assert gone.again and reserve.lease == 2


def test_a_prompt_that_is_retracted_without_a_lease(side: PrefillSide) -> None:
    side.reach("OPEN")
    side.retract()
    side.claim()
    assert side.sent("d0") == [], "the claim waits until the prompt is computed again"
    side.launch(4)
    assert kinds(side.sent("d0")) == [ReservePages]


def test_a_claim_of_a_retracted_prompt_may_end_while_it_drains(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.retract()
    side.revoke(final=False)
    side.launch(4, step=2)
    side.end_pushes()
    (gone,) = side.sent("d0")
    assert not gone.again and side.state == "OPEN"


def test_a_retracted_prompt_of_a_lost_claimant_is_kept_for_another(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.retract()
    side.peers.closed(1)
    side.offers.link_lost("d0", 0.0)
    side.end_pushes()
    assert side.offer.claimant is None and side.state == "OPEN"


def test_the_first_token_of_a_prompt_that_drains_is_told_if_the_claim_stands(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.retract()
    side.launch(10, step=2)
    side.first()
    assert kinds(side.sent("d0")) == [First]


def test_the_first_token_of_a_prompt_that_drains_is_not_told_without_a_claim(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.launch(10)
    side.first()
    assert side.sent("d0") == []
    side.end_pushes()
    assert side.offer.deadline == 1.0 + UNCLAIMED_S


def test_pages_of_an_offer_without_a_claim_are_given_back(side: PrefillSide) -> None:
    side.reach("OPEN")
    side.launch(10)
    side.first()
    side.offers.withdraw_all(1.0)
    assert side.state == "ENDED" and side.port.home == [11, 12, 13]
    side.claim()
    assert [getattr(m, "reason", "") for m in side.sent("d0")] == ["", "retracted"]


def test_pages_of_a_claimed_offer_are_given_back(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    side.launch(10)
    side.first()
    side.sent("d0")
    side.offers.withdraw_all(1.0)
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="retracted")]
    assert side.state == "ENDED" and side.port.home == [11, 12, 13]


@pytest.mark.parametrize("state", ["SENDING", "DRAINING"])
def test_pages_that_are_pushed_are_given_back_behind_the_last_push(side: PrefillSide, state: str) -> None:
    side.reach(state)
    side.launch(10)
    side.first()
    side.offers.withdraw_all(1.0)
    assert side.port.home == [] and side.state == "DRAINING"
    side.end_pushes()
    assert side.state == "ENDED" and side.port.home == [11, 12, 13]
    reason = {"SENDING": "retracted", "DRAINING": "withdrawn"}[state]
    assert [m.reason for m in side.sent("d0") if isinstance(m, Gone)] == [reason]


def test_a_prompt_that_runs_is_not_withdrawn(side: PrefillSide) -> None:
    side.reach("OPEN")
    side.offers.withdraw_all(1.0)
    assert side.state == "OPEN"


def test_a_prompt_that_drains_is_retracted_again(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.retract()
    side.launch(10, step=2)
    side.retract()
    assert side.port.home == [11, 12, 13], "no push reads what the second attempt has computed"
    side.end_pushes()
    (gone,) = side.sent("d0")
    assert gone.again and side.state == "OPEN", "the claim waits until the prompt is computed again"


# --- lost connections ---


def test_the_last_word_comes_over_the_next_connection(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.peers.closed(1)
    side.offers.link_lost("d0", 0.0)
    side.link("d0")
    side.end_pushes()
    assert side.sent("d0") == [Gone(handoff=1, lease=1, reason="link")]


@pytest.mark.parametrize("state", ["OPEN", "CLAIMED"])
def test_another_decode_worker_gets_the_offer_of_a_lost_one(side: PrefillSide, state: str) -> None:
    side.begin()
    side.claim()
    if state == "CLAIMED":
        side.launch(10)
        side.first()
    side.peers.closed(1)
    side.offers.link_lost("d0", 3.0)
    assert side.state == "OPEN"
    if state == "CLAIMED":
        assert side.offers.next_deadline == 3.0 + UNCLAIMED_S
    side.launch(10)
    side.claim("d1")
    assert kinds(side.sent("d1"))[:1] == [ReservePages]


def test_a_lost_connection_does_not_end_pushes(side: PrefillSide) -> None:
    side.reach("SENDING")
    side.launch(10)
    side.first()
    side.peers.closed(1)
    side.offers.link_lost("d0", 0.0)
    assert side.state == "DRAINING" and side.port.home == []
    side.end_pushes()
    assert side.state == "OPEN", "the pages are kept for another decode worker"
    side.claim("d1")
    assert kinds(side.sent("d1")) == [ReservePages, First]


def test_a_lost_decode_worker_that_claims_next_is_forgotten(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.claim("d1")
    side.offers.link_lost("d1", 0.0)
    side.end_pushes()
    assert side.sent("d1") == []


# --- what a decode worker must not say ---


@pytest.mark.parametrize(
    ("first_page", "num_pages"), [(0, 2), (0, 4), (1, 3), (4, 0), (-1, 4)], ids=lambda value: str(value)
)
def test_a_grant_of_a_wrong_number_of_pages(side: PrefillSide, first_page: int, num_pages: int) -> None:
    side.reach("CLAIMED")
    with pytest.raises(ProtocolViolation, match="but the prompt has 3 pages"):
        side.grant(first_page=first_page, pages=range(num_pages))


def test_a_grant_whose_page_ids_are_cut(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    with pytest.raises(ProtocolViolation, match="11 bytes of page ids"):
        side.offers.on_grant("d0", Grant(handoff=1, lease=1, first_page=0, pages=bytes(11)), 0.0)


def test_a_second_grant(side: PrefillSide) -> None:
    side.reach("SENDING")
    with pytest.raises(ProtocolViolation, match="have been granted"):
        side.grant()


def test_a_grant_for_no_lease_is_ignored(side: PrefillSide) -> None:
    side.begin()
    side.claim()
    side.grant()
    assert side.state == "OPEN" and side.pushes() == []


@pytest.mark.parametrize("lease", [0, 2])
def test_a_grant_for_another_lease_is_ignored(side: PrefillSide, lease: int) -> None:
    side.reach("CLAIMED")
    side.offers.on_grant("d0", Grant(handoff=1, lease=lease, first_page=0, pages=bytes(12)), 0.0)
    assert side.state == "CLAIMED"


def test_a_grant_while_it_drains_is_ignored(side: PrefillSide) -> None:
    side.reach("DRAINING")
    side.grant()
    assert side.state == "DRAINING" and len(side.pushes()) == 1


def test_words_of_a_worker_without_the_lease_are_ignored(side: PrefillSide) -> None:
    side.reach("CLAIMED")
    side.grant("d1")
    side.revoke(final=True, name="d1", lease=0)
    assert side.state == "CLAIMED" and side.sent("d1") == []
