"""What is remembered of handovers that have ended: their events in order, and no more than the last ones."""

from __future__ import annotations

from typing import Any

from segue.disagg.lease import Lease, LeaseState
from segue.disagg.recent import MOST_EVENTS, NUM_RECENT, RecentHandovers, note
from segue.messages.kv import PushEnded
from tests.disagg.sides import DecodeSide, PrefillSide


def lease(handoff: int) -> Lease:
    return Lease(handoff=handoff, rid=f"r{handoff}", address="", num_tokens=3, prompt_hash=b"", order=(0, 1))


def events(recent: RecentHandovers) -> list[tuple[Any, ...]]:
    (ended,) = recent.report()
    return [tuple(event.values()) for event in ended["events"]]


def test_only_the_last_ones_are_remembered() -> None:
    recent = RecentHandovers("decode")
    for handoff in range(NUM_RECENT + 5):
        recent.add(lease(handoff))
    assert [each["handoff"] for each in recent.report()] == list(range(5, NUM_RECENT + 5))


def test_the_events_of_one_handover_are_bounded() -> None:
    one = lease(1)
    for number in range(MOST_EVENTS + 5):
        note(one.events, "launched", 1.0, number + 1)
    assert [count for _, _, count in one.events] == list(range(1, MOST_EVENTS + 1))


def test_an_offer_shows_its_chunks_and_its_pushes() -> None:
    side = PrefillSide()
    side.begin()
    side.claim()
    side.now = 1.0
    side.launch(4)
    side.now = 2.0
    side.grant()
    side.offers.computed(1, 4, 3.0)
    side.now = 4.0
    side.launch(10, step=2)
    side.first(now=5.0)
    assert side.offers.recent.report() == [], "it has not ended"
    for ticket, at in zip(list(side.offer.pushes), (6.0, 7.0), strict=True):
        side.offers.push_ended(PushEnded(ticket=ticket, at=at - 0.5), at)
    assert events(side.offers.recent) == [
        ("begin", 0.0),
        ("launched", 1.0, 4),
        ("ready", 1.0),
        ("grant", 2.0),
        ("posted", 2.0, 1),
        ("computed", 3.0, 4),
        ("launched", 4.0, 10),
        ("posted", 4.0, 3),
        ("first", 5.0),
        ("pushed", 5.5),  # and not when that became known
        ("pushed", 6.5),
        ("complete", 7.0),
    ]


def test_a_lease_shows_when_its_kv_was_granted_and_adopted() -> None:
    side = DecodeSide()
    side.reach(LeaseState.GRANTED)
    side.first(1.0)
    side.landed(2.0)
    side.leases.adopted(1, 3.0)
    assert events(side.leases.recent) == [
        ("claim", 0.0),
        ("reserve", 0.0),
        ("room", 0.0),
        ("first", 1.0),
        ("sent", 2.0),
        ("adopted", 3.0),
    ]


def test_a_lease_whose_request_has_ended_shows_how_long_its_pages_stayed() -> None:
    side = DecodeSide()
    side.reach(LeaseState.REVOKED)
    assert side.leases.recent.report() == []
    side.gone(now=4.0, number=7)
    assert events(side.leases.recent)[-2:] == [("unwanted", 0.0), ("gone", 4.0)]
