"""Leases, one event at a time."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import pytest
from msgspec import structs

from segue.disagg.lease import (
    LOST_S,
    RECONNECT_S,
    SILENT_S,
    STEP_S,
    STUCK_S,
    WEIGHTS_S,
    LeaseEvent,
    LeaseState,
)
from segue.disagg.lease_machine import LEASE
from segue.disagg.peers import ProtocolViolation
from segue.messages.kv import (
    Claim,
    Gone,
    Grant,
    HeadPiece,
    HeadSums,
    KVIdentity,
    PagesPrepared,
    PreparePages,
    PromptLogprobs,
    Pushed,
    Revoke,
)
from segue.messages.requests import TokenLogprob, pack_ids
from tests.disagg.sides import ADDRESS, HASH, NUM_TOKENS, V1, VOCAB_SIZE, DecodeSide, first

# Events that cannot happen in a state, and why.
NO_LEASE = "the prefill worker has not begun a lease, and what it says of one is ignored or a violation"
NO_PAGES = "it has no pages"
NOT_SENT = "what comes in this state is refused by `Leases.on_sent`"
NOT_LEFT = "it is the lease of a request that awaits its KV: another one has `LINK_BACK`"
NO_WRITERS = "`WRITERS_GONE` is for leases that have left their request"
NOT_RAW = "the own ranks have nothing to make ready"
NO_KV = "it has no KV whose weights would count"
NO_REQUEST = "it has left its request"
NO_LINK = "no connection is open, over which it could come or which could be lost"
IMPOSSIBLE = {
    "CLAIMED": {
        "PREPARED": NOT_RAW,
        "UNUSABLE": NOT_RAW,
        "SENT_RAW": NOT_SENT,
        "NEWER": NO_KV,
        "COMMITTED": NO_KV,
        "ROOM": NO_LEASE,
        "SENT": NOT_SENT,
        "GONE_AGAIN": NO_LEASE,
        "SILENT": "nobody waits for progress",
        "LINK_BACK": NOT_LEFT,
        "WRITERS_GONE": NO_WRITERS,
        "ADOPTED": NO_PAGES,
    },
    "QUEUED": {
        "PREPARED": NOT_RAW,
        "UNUSABLE": NOT_RAW,
        "SENT_RAW": NOT_SENT,
        "NEWER": NO_KV,
        "COMMITTED": NO_KV,
        "RESERVE": "a second one is refused by `Leases.on_reserve`",
        "SENT": NOT_SENT,
        "SILENT": "the prefill worker's clock counts",
        "LINK_BACK": NOT_LEFT,
        "WRITERS_GONE": NO_WRITERS,
        "ADOPTED": NO_PAGES,
    },
    "GRANTED": {
        "PREPARED": NOT_RAW,
        "UNUSABLE": NOT_RAW,
        "NEWER": NO_KV,
        "COMMITTED": NO_KV,
        "RESERVE": "a second one is refused by `Leases.on_reserve`",
        "ROOM": "it has pages",
        "LINK_BACK": NOT_LEFT,
        "WRITERS_GONE": NO_WRITERS,
        "ADOPTED": "its pages are not all written",
    },
    "PREPARING": {
        "RESERVE": "a second one is refused by `Leases.on_reserve`",
        "ROOM": "it has pages",
        "SENT": NOT_SENT,
        "SENT_RAW": NOT_SENT,
        "GONE": "it is ignored by `Leases.on_gone`",
        "GONE_AGAIN": "it is ignored by `Leases.on_gone`",
        "SILENT": "nothing more has to come",
        "LINK_BACK": NOT_LEFT,
        "WRITERS_GONE": NO_WRITERS,
        "NEWER": NO_KV,
        "COMMITTED": NO_KV,
        "ADOPTED": "its pages are not ready",
    },
    "DROPPED": {
        "RESERVE": NO_REQUEST,
        "ROOM": NO_REQUEST,
        "SENT": NOT_SENT,
        "SENT_RAW": NOT_SENT,
        "GONE": "it is ignored by `Leases.on_gone`",
        "GONE_AGAIN": "it is ignored by `Leases.on_gone`",
        "UNWANTED": NO_REQUEST,
        "WANTED_BACK": NO_REQUEST,
        "SILENT": "nothing more has to come",
        "NEWER": NO_KV,
        "COMMITTED": NO_KV,
        "ADOPTED": NO_REQUEST,
    },
    "LANDED": {
        "PREPARED": NOT_RAW,
        "UNUSABLE": NOT_RAW,
        "SENT_RAW": NOT_SENT,
        "RESERVE": "a second one is refused by `Leases.on_reserve`",
        "ROOM": "it has pages",
        "SENT": NOT_SENT,
        "GONE": "it is ignored by `Leases.on_gone`",
        "GONE_AGAIN": "it is ignored by `Leases.on_gone`",
        "SILENT": "nothing more has to come",
        "LINK_BACK": NOT_LEFT,
        "WRITERS_GONE": NO_WRITERS,
    },
    "AHEAD": {
        "PREPARED": NOT_RAW,
        "UNUSABLE": NOT_RAW,
        "SENT_RAW": NOT_SENT,
        "RESERVE": "a second one is refused by `Leases.on_reserve`",
        "ROOM": "it has pages",
        "SENT": NOT_SENT,
        "GONE": "it is ignored by `Leases.on_gone`",
        "GONE_AGAIN": "it is ignored by `Leases.on_gone`",
        "LINK_BACK": NOT_LEFT,
        "WRITERS_GONE": NO_WRITERS,
        "NEWER": "it waits already",
        "ADOPTED": "it waits for weights",
    },
    "REVOKED": {
        "PREPARED": NOT_RAW,
        "UNUSABLE": NOT_RAW,
        "SENT_RAW": NO_REQUEST,
        "NEWER": NO_KV,
        "COMMITTED": NO_KV,
        "RESERVE": NO_REQUEST,
        "ROOM": NO_REQUEST,
        "UNWANTED": NO_REQUEST,
        "WANTED_BACK": NO_REQUEST,
        "LINK_BACK": "a connection that another one replaces is lost first",
        "ADOPTED": NO_REQUEST,
    },
    "QUARANTINED": {
        "PREPARED": NOT_RAW,
        "UNUSABLE": NOT_RAW,
        "SENT_RAW": NO_REQUEST,
        "NEWER": NO_KV,
        "COMMITTED": NO_KV,
        "RESERVE": NO_REQUEST,
        "ROOM": NO_REQUEST,
        "SENT": NO_LINK,
        "GONE": NO_LINK,
        "GONE_AGAIN": NO_LINK,
        "UNWANTED": NO_REQUEST,
        "WANTED_BACK": NO_REQUEST,
        "LINK_LOST": NO_LINK,
        "ADOPTED": NO_REQUEST,
    },
}
S = LeaseState
V2 = KVIdentity("v2", 1)


@pytest.fixture
def side() -> DecodeSide:
    return DecodeSide()


def test_every_event_has_a_row_in_every_state_or_cannot_happen() -> None:
    for state in set(LeaseState) - {LeaseState.ENDED}:
        rows = {event.name for event in LEASE[state]}
        assert rows & set(IMPOSSIBLE[state.name]) == set()
        assert rows | set(IMPOSSIBLE[state.name]) == {event.name for event in LeaseEvent}, state


# --- claims ---


def test_a_request_claims_its_kv(side: DecodeSide) -> None:
    side.claim()
    assert side.sent("p0") == [Claim(handoff=1, rid="r1", num_tokens=NUM_TOKENS, prompt_hash=HASH)]


def test_a_claim_waits_for_its_connection(side: DecodeSide) -> None:
    side.cut()
    side.claim()
    assert side.peers.connects == [ADDRESS]
    side.connect()
    assert [type(message) for message in side.sent("p0")] == [Claim]


def test_a_prefill_worker_that_cannot_be_reached(side: DecodeSide) -> None:
    side.cut()
    side.claim()
    side.leases.unreachable(ADDRESS, 0.0)
    assert side.port.given_up == [("r1", "link")] and side.state == "ENDED"
    assert side.leases.active == {}


def test_a_suspect_prefill_worker_is_not_asked(side: DecodeSide) -> None:
    side.peers.open["p0"].is_suspect = True
    side.claim()
    assert side.port.given_up == [("r1", "suspect")] and side.sent("p0") == []


# --- the usual way ---


def test_pages_are_granted_in_the_order_of_requests(side: DecodeSide) -> None:
    side.reach(S.QUEUED)
    second = side.new_lease(2)
    second.order = (-1, 2)  # of a higher priority
    side.leases.claim(second, 0.0)
    second.number, second.state = 8, S.QUEUED
    side.grant()
    assert second.state is S.GRANTED and side.state == "QUEUED"


def test_a_grant_names_the_pages_and_the_first_one_that_is_missing(side: DecodeSide) -> None:
    side.reach(S.QUEUED)
    side.sent("p0")
    side.grant()
    assert side.sent("p0") == [Grant(handoff=1, lease=7, first_page=0, pages=pack_ids([21, 22, 23]))]


def test_without_room_nothing_is_granted(side: DecodeSide) -> None:
    side.reach(S.QUEUED)
    side.leases.grant_all(0.0)
    assert side.state == "QUEUED" and side.leases.num_places == 0


def test_a_granted_lease_keeps_a_place(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    assert side.leases.num_places == 1
    side.leases.cancel(1, 0.0)
    assert side.leases.num_places == 0


def test_kv_lands_behind_the_first_token(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.first()
    assert side.leases.landed == []
    side.landed()
    assert side.leases.landed == [side.lease] and side.port.firsts == ["r1"]
    side.leases.adopted(1, 0.0)
    assert side.leases.active == {} and side.port.home == [], "the pages are the request's"


def test_the_first_token_is_taken_once(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.first()
    side.first()
    assert side.port.firsts == ["r1"]


@pytest.mark.parametrize("state", [S.CLAIMED, S.QUEUED, S.GRANTED])
def test_the_first_token_may_come_at_any_time(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.first()
    assert side.port.firsts == ["r1"] and side.lease.state is state


def test_logprobs_of_a_prompt_come_in_parts(side: DecodeSide) -> None:
    side.claim()
    for part in range(2):
        entry = TokenLogprob(part, -1.0)
        side.leases.on_logprobs("p0", PromptLogprobs(handoff=1, part=part, entries=[entry]), 0.0)
    side.first(parts=2)
    assert [entry.token for entry in side.lease.logprobs] == [0, 1]


def test_logprobs_that_come_again_replace_the_former_ones(side: DecodeSide) -> None:
    side.claim()
    for token in range(2):
        entry = TokenLogprob(token, -1.0)
        side.leases.on_logprobs("p0", PromptLogprobs(handoff=1, part=0, entries=[entry]), 0.0)
    side.first(parts=1)
    assert [entry.token for entry in side.lease.logprobs] == [1]


def test_commits_under_a_granted_lease_are_noted(side: DecodeSide) -> None:
    v2 = KVIdentity("v2", 1)
    side.reach(S.QUEUED)
    side.leases.committed(KVIdentity("v0", 1), V1, 0.0)
    side.grant()
    side.leases.committed(V1, v2, 0.0)
    assert side.lease.commits == [(V1, v2)]


# --- the prefill worker gives up ---


@pytest.mark.parametrize("state", [S.CLAIMED, S.QUEUED, S.GRANTED])
def test_kv_that_does_not_come(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.gone()
    assert side.port.given_up == [("r1", "transport")] and side.leases.active == {}
    assert side.port.home == ([21, 22, 23] if state is S.GRANTED else [])


@pytest.mark.parametrize("state", [S.QUEUED, S.GRANTED])
def test_kv_that_is_computed_again(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.gone(again=True)
    assert side.state == "CLAIMED" and side.port.given_up == []
    assert side.port.home == ([21, 22, 23] if state is S.GRANTED else [])
    side.sent("p0")
    side.reserve(8)
    side.grant()
    assert [message.lease for message in side.sent("p0")] == [8]


@pytest.mark.parametrize("state", [S.QUEUED, S.GRANTED])
def test_a_claim_of_kv_that_is_computed_again_may_be_refused(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.gone(again=True)
    side.gone(number=0)
    assert side.port.given_up == [("r1", "transport")] and side.leases.active == {}


def test_a_word_about_an_earlier_lease_is_ignored(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.gone(number=6)
    assert side.state == "GRANTED"


def test_a_word_behind_sent_is_ignored(side: DecodeSide) -> None:
    side.reach(S.LANDED)
    side.gone()
    assert side.state == "LANDED"


# --- the request ends, or its pages are wanted back ---


@pytest.mark.parametrize("state", [S.CLAIMED, S.QUEUED])
def test_a_request_that_ends_without_pages(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.sent("p0")
    side.leases.cancel(1, 0.0)
    number = 7 if state is S.QUEUED else 0
    assert side.sent("p0") == [Revoke(handoff=1, lease=number, reason="ended", final=True)]
    assert side.state == "ENDED" and list(side.leases) == []


def test_pages_of_an_ended_request_come_home_by_the_last_word(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.sent("p0")
    side.leases.cancel(1, 0.0)
    assert side.sent("p0") == [Revoke(handoff=1, lease=7, reason="ended", final=True)]
    assert side.port.home == []
    side.gone()
    assert side.port.home == [21, 22, 23] and list(side.leases) == []


@pytest.mark.parametrize("word", ["sent", "gone", "again"])
def test_every_last_word_frees_the_pages(side: DecodeSide, word: str) -> None:
    side.reach(S.REVOKED)
    if word == "sent":
        side.landed()
    else:
        side.gone(again=word == "again")
    assert side.port.home == [21, 22, 23] and side.port.given_up == [] and list(side.leases) == []


def test_a_request_that_ends_before_it_adopts(side: DecodeSide) -> None:
    side.reach(S.LANDED)
    side.leases.cancel(1, 0.0)
    assert side.port.home == [21, 22, 23] and side.sent("p0") == [] and list(side.leases) == []


@pytest.mark.parametrize("state", [S.CLAIMED, S.QUEUED])
def test_a_lease_without_pages_gives_none_back(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.sent("p0")
    side.leases.take_back_all("memory", 0.0)
    assert side.lease.state is state and side.sent("p0") == []


def test_a_request_without_a_first_token_claims_again(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.sent("p0")
    side.leases.take_back_all("memory", 0.0)
    revoke, claim = side.sent("p0")
    assert revoke == Revoke(handoff=1, lease=7, reason="memory", final=False) and isinstance(claim, Claim)
    again = side.leases.active[1]
    assert again is not side.lease and again.state is S.CLAIMED and side.port.home == []
    side.gone(number=7)
    assert side.port.home == [21, 22, 23] and side.leases.active == {1: again}


def test_a_request_with_a_first_token_goes_on_alone(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.first()
    side.sent("p0")
    side.leases.take_back_all("memory", 0.0)
    assert side.sent("p0") == [Revoke(handoff=1, lease=7, reason="memory", final=True)]
    assert [rid for rid, _ in side.port.given_up] == ["r1"] and side.state == "REVOKED"


def test_landed_pages_are_wanted_back(side: DecodeSide) -> None:
    side.reach(S.LANDED)
    side.leases.take_back_all("memory", 0.0)
    assert side.port.home == [21, 22, 23] and [rid for rid, _ in side.port.given_up] == ["r1"]


# --- silence ---


@pytest.mark.parametrize("end", ["unwanted", "wanted back", "silent", "link back"])
def test_a_revoked_lease_has_its_own_time_for_the_last_word(side: DecodeSide, end: str) -> None:
    side.reach(S.QUARANTINED if end == "link back" else S.GRANTED)
    match end:
        case "unwanted":
            side.leases.cancel(1, 20.0)
        case "wanted back":
            side.leases.take_back_all("memory", 20.0)
        case "silent":
            side.leases.expire(20.0)
        case "link back":
            side.connect(now=20.0)
    assert side.state == "REVOKED"
    assert (side.lease.revoked_at, side.lease.deadline) == (20.0, 20.0 + SILENT_S)


def test_a_silent_lease_is_revoked(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.sent("p0")
    assert side.leases.next_deadline == SILENT_S
    side.leases.expire(SILENT_S)
    assert side.sent("p0") == [Revoke(handoff=1, lease=7, reason="silent", final=True)]
    assert side.port.given_up == [("r1", "expired")] and side.port.home == []


@pytest.mark.parametrize("word", ["progress", "first"])
def test_a_lease_that_lives_is_kept(side: DecodeSide, word: str) -> None:
    side.reach(S.GRANTED)
    if word == "first":
        side.first(now=5.0)
    else:
        side.leases.on_progress("p0", Pushed(handoff=1, lease=7, pages=0), 5.0)
    assert side.leases.next_deadline == 5.0 + SILENT_S


@pytest.mark.parametrize("state", [S.CLAIMED, S.QUEUED, S.LANDED])
def test_only_granted_pages_are_waited_for(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    assert side.leases.next_deadline > 1e9


def test_a_pair_without_a_last_word_is_suspect_and_then_closed(side: DecodeSide) -> None:
    side.reach(S.REVOKED)
    side.leases.expire(SILENT_S)
    assert side.peers.open["p0"].is_suspect and side.peers.closes == []
    assert side.leases.next_deadline == STUCK_S
    side.leases.expire(STUCK_S)
    assert [number for number, _ in side.peers.closes] == [1] and side.port.home == []


@pytest.mark.parametrize("word", ["sent", "gone", "again", "writers"])
def test_a_last_word_ends_the_suspicion(side: DecodeSide, word: str) -> None:
    side.reach(S.REVOKED)
    side.leases.expire(SILENT_S)
    match word:
        case "sent":
            side.landed(now=SILENT_S + 1)
        case "writers":
            side.leases.writers_gone("s1", SILENT_S + 1)
        case _:
            side.gone(again=word == "again", now=SILENT_S + 1)
    assert not side.peers.open["p0"].is_suspect


def test_the_suspicion_stays_while_another_word_is_late(side: DecodeSide) -> None:
    side.reach(S.REVOKED)
    other = side.new_lease(2)
    side.leases.claim(other, 0.0)
    other.number, other.state = 8, S.QUEUED
    side.grant()
    side.leases.cancel(2, 0.0)
    side.leases.expire(SILENT_S)
    side.gone(now=SILENT_S + 1)
    assert side.peers.open["p0"].is_suspect


# --- lost connections ---


@pytest.mark.parametrize("state", [S.CLAIMED, S.QUEUED])
def test_a_lost_connection_ends_leases_without_pages(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.cut()
    assert side.port.given_up == [("r1", "link")] and list(side.leases) == []


@pytest.mark.parametrize("state", [S.GRANTED, S.REVOKED])
def test_pages_of_a_lost_connection_are_kept(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.cut()
    assert side.state == "QUARANTINED" and side.port.home == []
    assert side.port.given_up == ([("r1", "link")] if state is S.GRANTED else [])


def test_landed_pages_need_no_connection(side: DecodeSide) -> None:
    side.reach(S.LANDED)
    side.cut()
    assert side.leases.landed == [side.lease]


@pytest.mark.parametrize("state", [S.GRANTED, S.REVOKED])
def test_a_connection_is_opened_for_a_missing_last_word(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    side.cut(now=2.0)
    assert side.leases.next_deadline == 2.0 + RECONNECT_S
    side.leases.expire(2.0 + RECONNECT_S)
    assert side.peers.connects == [ADDRESS]
    assert side.leases.next_deadline == 2.0 + 2 * RECONNECT_S, "it is tried again"


def test_the_last_word_is_asked_for_over_the_next_connection(side: DecodeSide) -> None:
    side.reach(S.QUARANTINED)
    side.connect(now=3.0)
    assert side.sent("p0") == [Revoke(handoff=1, lease=7, reason="ended", final=False)]
    assert side.state == "REVOKED" and side.leases.next_deadline <= 3.0 + SILENT_S
    side.gone()
    assert side.port.home == [21, 22, 23] and list(side.leases) == []


def test_nothing_is_reconnected_for_without_pages(side: DecodeSide) -> None:
    side.reach(S.QUARANTINED)
    side.leases.writers_gone("s1", 0.5)
    side.leases.expire(RECONNECT_S)
    assert side.peers.connects == [] and side.leases.next_deadline > 1e9


@pytest.mark.parametrize("back", [False, True])
def test_pages_come_home_when_nobody_can_write(side: DecodeSide, back: bool) -> None:
    side.reach(S.QUARANTINED)
    if back:
        side.connect()
    side.leases.writers_gone("another", 0.0)
    assert side.port.home == []
    side.leases.writers_gone("s1", 0.0)
    assert side.port.home == [21, 22, 23] and list(side.leases) == []


def test_pages_of_a_live_connection_do_not_come_home_by_an_old_ones_end(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    side.leases.writers_gone("s1", 0.0)
    assert side.port.home == [] and side.state == "GRANTED"


# --- what a prefill worker must not say ---


@pytest.mark.parametrize("state", [S.QUEUED, S.GRANTED, S.LANDED])
def test_a_second_reservation(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    with pytest.raises(ProtocolViolation, match=f"in the state {state.name}"):
        side.reserve(8)


def test_a_reservation_for_another_length(side: DecodeSide) -> None:
    side.claim()
    with pytest.raises(ProtocolViolation, match=r"ReservePages for 9 tokens .* which has 10"):
        side.reserve(num_tokens=9)


@pytest.mark.parametrize("number", [0, -1, 7])
def test_a_reservation_must_begin_a_new_lease(side: DecodeSide, number: int) -> None:
    side.reach(S.GRANTED)
    side.leases.take_back_all("memory", 0.0)  # lease 7 waits for its last word, and the request claims again
    with pytest.raises(ProtocolViolation, match="which is not new"):
        side.reserve(number)


@pytest.mark.parametrize("state", [S.QUEUED, S.LANDED])
def test_sent_without_granted_pages(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    with pytest.raises(ProtocolViolation, match=f"in the state {state.name}"):
        side.landed()


def test_sent_before_the_first_token(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    with pytest.raises(ProtocolViolation, match="before its First"):
        side.landed()


def test_a_refusal_cannot_ask_to_wait(side: DecodeSide) -> None:
    side.claim()
    side.gone(again=True)
    assert side.port.given_up == [("r1", "transport")]


def test_a_part_of_logprobs_is_missing(side: DecodeSide) -> None:
    side.claim()
    with pytest.raises(ProtocolViolation, match="part 1, but part 0"):
        side.leases.on_logprobs("p0", PromptLogprobs(handoff=1, part=1, entries=[]), 0.0)
    with pytest.raises(ProtocolViolation, match="0 parts of logprobs, not 1"):
        side.first(parts=1)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_tokens_outside_the_vocabulary(side: DecodeSide, token: int) -> None:
    side.claim()
    wrong = TokenLogprob(token, -1.0), TokenLogprob(5, -1.0, [(5, -1.0), (token, -2.0)])
    for entry in wrong:
        with pytest.raises(ProtocolViolation, match=f"has token {token}, .* has {VOCAB_SIZE}"):
            side.leases.on_logprobs("p0", PromptLogprobs(handoff=1, part=0, entries=[entry]), 0.0)
        with pytest.raises(ProtocolViolation, match=f"has token {token}"):
            side.first(logprob=entry)
    with pytest.raises(ProtocolViolation, match=f"First for handoff 1 has token {token}"):
        side.leases.on_first("p0", structs.replace(first(), token=token), 0.0)
    assert side.port.firsts == []


@pytest.mark.parametrize("call", ["reserve", "first", "gone", "progress", "logprobs"])
def test_a_worker_that_was_not_asked_is_ignored(side: DecodeSide, call: str) -> None:
    side.claim()
    side.lease.peer = "another"
    calls: dict[str, Any] = {
        "reserve": side.reserve,
        "first": side.first,
        "gone": side.gone,
        "progress": lambda: side.leases.on_progress("p0", Pushed(handoff=1, lease=0, pages=0), 0.0),
        "logprobs": lambda: side.leases.on_logprobs("p0", PromptLogprobs(handoff=1, part=3, entries=[]), 0.0),
    }
    calls[call]()
    assert side.state == "CLAIMED" and side.port.firsts == side.port.given_up == []


# --- KV of newer weights ---


@pytest.fixture
def ahead(side: DecodeSide) -> DecodeSide:
    side.reach(S.LANDED)
    assert side.leases.await_weights(side.lease, 5.0)
    assert side.state == "AHEAD" and side.leases.landed == []
    return side


def test_kv_of_newer_weights_waits_for_the_commit(ahead: DecodeSide) -> None:
    ahead.leases.committed(V1, V2, 6.0)
    assert ahead.leases.landed == [ahead.lease] and ahead.lease.deadline == inf


def test_without_the_commit_the_prompt_is_computed(ahead: DecodeSide) -> None:
    assert ahead.leases.next_deadline == 5.0 + WEIGHTS_S
    ahead.leases.expire(5.0 + WEIGHTS_S)
    assert ahead.port.given_up == [("r1", "version")] and ahead.port.home == [21, 22, 23]
    assert list(ahead.leases) == []


def test_a_second_commit_gives_no_second_time(ahead: DecodeSide) -> None:
    ahead.leases.committed(V1, V2, 6.0)
    assert ahead.leases.await_weights(ahead.lease, 6.5)
    assert ahead.lease.deadline == 5.0 + WEIGHTS_S
    ahead.leases.committed(V1, V2, 6.9)
    assert not ahead.leases.await_weights(ahead.lease, 7.0)


def test_kv_that_waits_for_weights_needs_no_connection_and_no_last_word(ahead: DecodeSide) -> None:
    ahead.gone()
    ahead.cut()
    assert ahead.state == "AHEAD"


@pytest.mark.parametrize("is_wanted", [True, False])
def test_pages_that_wait_for_weights_are_wanted_back(ahead: DecodeSide, is_wanted: bool) -> None:
    if is_wanted:
        ahead.leases.take_back_all("memory", 6.0)
    else:
        ahead.leases.cancel(1, 6.0)
    assert ahead.port.home == [21, 22, 23]
    assert ahead.port.given_up == ([("r1", "version")] if is_wanted else [])


# --- pages that the own ranks make ready ---

Reason = Literal["checksum", "transport"]
SUMS = [HeadSums(target_rank=0, head=0, num_heads=1, crcs=bytes(12))]
PIECES = [HeadPiece(target_rank=1, head=head, num_heads=1) for head in range(2)]


@pytest.fixture
def preparing(side: DecodeSide) -> DecodeSide:
    side.reach(S.PREPARING)
    return side


def prepared(side: DecodeSide, error: str = "", reason: Reason = "checksum") -> None:
    side.leases.prepared(PagesPrepared(ticket=1, error=error, reason=reason), 0.0)


def test_pages_with_checksums_are_compared_by_every_rank(preparing: DecodeSide) -> None:
    assert preparing.peers.commands == [PreparePages(ticket=1, pages=[21, 22, 23], pieces=[], sums=SUMS)]
    prepared(preparing)
    assert preparing.leases.landed == [], "the other rank has not answered"
    prepared(preparing)
    assert preparing.leases.landed == [preparing.lease]


def test_pages_that_come_in_pieces_are_put_in_order_before_they_are_used(side: DecodeSide) -> None:
    side.peers.open["p0"].pieces = PIECES
    side.reach(S.PREPARING)
    assert side.peers.commands == [PreparePages(ticket=1, pages=[21, 22, 23], pieces=PIECES, sums=SUMS)]


def test_pieces_without_checksums_are_put_in_order_too(side: DecodeSide) -> None:
    side.peers.open["p0"].pieces = PIECES
    side.reach(S.GRANTED)
    side.first()
    side.landed()
    assert side.peers.commands == [PreparePages(ticket=1, pages=[21, 22, 23], pieces=PIECES, sums=[])]
    assert side.leases.landed == []


@pytest.mark.parametrize("order", [("page 22 differs", ""), ("", "page 22 differs")], ids=["first", "last"])
@pytest.mark.parametrize("reason", ["checksum", "transport"])
def test_pages_that_are_unusable_come_home_when_every_rank_has_answered(
    preparing: DecodeSide, order: tuple[str, str], reason: Reason
) -> None:
    prepared(preparing, order[0], reason)
    assert preparing.port.home == [] and preparing.state == "PREPARING", "the other rank may write to them"
    prepared(preparing, order[1], reason)
    assert preparing.port.given_up == [("r1", reason)] and preparing.port.home == [21, 22, 23]
    assert list(preparing.leases) == []


@pytest.mark.parametrize("is_wanted", [True, False])
@pytest.mark.parametrize("error", ["", "page 22 differs"])
def test_pages_that_are_given_up_come_home_when_every_rank_has_answered(
    preparing: DecodeSide, is_wanted: bool, error: str
) -> None:
    if is_wanted:
        preparing.leases.take_back_all("memory", 0.0)
    else:
        preparing.leases.cancel(1, 0.0)
    assert preparing.state == "DROPPED" and preparing.leases.active == {}
    assert preparing.lease.is_kept_for_a_while, "its pages do not count as lost"
    prepared(preparing, error)
    assert preparing.port.home == [], "the other rank may write to them"
    prepared(preparing)
    assert preparing.port.home == [21, 22, 23] and len(preparing.port.given_up) == is_wanted
    assert list(preparing.leases) == [] and preparing.sent("p0") == []


@pytest.mark.parametrize("state", ["PREPARING", "DROPPED"])
def test_the_own_ranks_need_no_connection_and_no_last_word(preparing: DecodeSide, state: str) -> None:
    if state == "DROPPED":
        preparing.leases.cancel(1, 0.0)
    preparing.gone()
    preparing.cut()
    preparing.connect()
    preparing.leases.writers_gone("s1", 0.0)
    assert preparing.state == state and preparing.port.home == []
    with pytest.raises(ProtocolViolation, match=f"Sent for handoff 1 in the state {state}"):
        preparing.landed()


def test_pages_that_are_given_up_make_no_peer_suspect(side: DecodeSide) -> None:
    side.reach(S.PREPARING)
    side.leases.cancel(1, 0.0)
    other = side.new_lease(2)
    side.leases.claim(other, 0.0)
    other.number, other.state = 8, S.QUEUED
    side.grant()
    side.leases.cancel(2, 100.0)
    side.leases.on_gone("p0", Gone(handoff=2, lease=8, reason="withdrawn"), 101.0)
    assert side.state == "DROPPED" and not side.peers.open["p0"].is_suspect


def test_pages_that_nobody_wants_any_more_are_not_prepared(side: DecodeSide) -> None:
    side.peers.open["p0"].pieces = PIECES
    side.reach(S.REVOKED)
    side.landed(sums=SUMS)
    assert side.peers.commands == [] and side.port.home == [21, 22, 23]


# --- long steps of the prefill worker ---


def load(side: DecodeSide, step: int, now: float, *, is_busy: bool = True) -> None:
    side.leases.on_load("p0", step, is_busy, now)


@pytest.mark.parametrize("state", [S.GRANTED, S.REVOKED])
def test_a_lease_is_not_silent_while_its_prefill_worker_computes(side: DecodeSide, state: LeaseState) -> None:
    side.reach(state)
    for second in range(1, 30):
        load(side, 5, float(second))
        side.leases.expire(float(second))
    assert side.lease.state is state and not side.peers.open["p0"].is_suspect
    assert side.lease.deadline == 29.0 + SILENT_S


def test_a_prefill_worker_that_computes_nothing_is_silent(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    load(side, 0, 9.0, is_busy=False)
    side.leases.expire(SILENT_S)
    assert side.state == "REVOKED"


def test_a_step_that_never_ends_is_given_up(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    now = 0.0
    while side.state == "GRANTED":
        now += 1.0
        load(side, 5, now)
        side.leases.expire(now)
        assert now < 2 * STEP_S
    assert now >= STEP_S and side.port.given_up == [("r1", "expired")]


def test_each_step_has_its_own_time(side: DecodeSide) -> None:
    side.reach(S.GRANTED)
    for step in range(1, 9):
        for second in range(60):
            now = step * 60.0 + second
            load(side, step, now)
            side.leases.expire(now)
    assert side.state == "GRANTED"


def test_a_worker_that_computes_for_others_does_not_lengthen_a_stuck_lease(side: DecodeSide) -> None:
    side.reach(S.REVOKED)
    side.leases.expire(SILENT_S)
    assert side.peers.open["p0"].is_suspect
    load(side, 5, SILENT_S + 1)
    assert side.lease.deadline == STUCK_S


# --- a transport that cannot prove that a writer has gone ---


@pytest.fixture
def unproven(side: DecodeSide) -> DecodeSide:
    """A decode worker whose pages come by NIXL."""
    side.cut()
    side.transport = "nixl"
    side.connect()
    return side


@pytest.mark.parametrize("state", [S.GRANTED, S.REVOKED])
def test_pages_whose_writer_may_live_come_home_after_a_while(unproven: DecodeSide, state: LeaseState) -> None:
    unproven.reach(state)
    unproven.cut(now=2.0)
    unproven.leases.expire(2.0 + LOST_S - 1)
    assert unproven.state == "QUARANTINED" and unproven.port.home == []
    unproven.leases.expire(2.0 + LOST_S)
    assert unproven.port.home == [21, 22, 23] and list(unproven.leases) == []


def test_a_writer_that_is_back_is_asked_however_long_it_takes(unproven: DecodeSide) -> None:
    unproven.reach(S.GRANTED)
    unproven.cut(now=2.0)
    unproven.connect(now=20.0)
    unproven.leases.expire(2.0 + LOST_S)
    assert unproven.state == "REVOKED" and unproven.port.home == []
    unproven.cut(now=40.0)
    unproven.leases.expire(40.0 + LOST_S - 1)
    assert unproven.state == "QUARANTINED" and unproven.port.home == [], "each lost connection has its time"
    unproven.leases.expire(40.0 + LOST_S)
    assert unproven.port.home == [21, 22, 23]


def test_time_alone_frees_nothing_where_there_is_proof(side: DecodeSide) -> None:
    side.reach(S.QUARANTINED)
    side.leases.expire(10 * LOST_S)
    assert side.state == "QUARANTINED" and side.port.home == []
