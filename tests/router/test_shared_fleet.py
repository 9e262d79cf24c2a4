"""Copies of the coordinator's fleet: a serving process sees the workers as the coordinator does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from segue.messages.fleet import Registration
from segue.router.breaker import Breaker, BreakerState
from segue.router.choice import Pair, RoutingRules, Whole
from segue.router.fleet import LAG_S, Assignment
from segue.router.foreign import foreign_record, foreign_report
from segue.router.membership import Membership
from segue.router.process_messages import FleetState
from segue.router.prompts import RequestFacts
from segue.router.registry import Registry
from segue.router.shared_fleet import FleetCopy, SharedFleet
from tests.router.workers import record, report

URL = "http://127.0.0.1:1"
FACTS = RequestFacts(num_tokens=100, num_bytes=400, native_route="/generate")


class TwoProcesses:
    """A coordinator's fleet, and a serving process's copy of it."""

    def __init__(self) -> None:
        self.membership = Membership(Registry(RoutingRules()), None)
        self.fleet = SharedFleet(self.membership.registry)
        self.registry = Registry(RoutingRules())
        self.copy = FleetCopy(self.registry)

    def add(self, url: str = URL, at: float = 0.0, role: Any = "both", **fields: Any) -> Any:
        entry = self.membership.add(url)
        self.membership.introduce(entry, record("any", role, **fields))
        self.membership.report(entry, report(), at)
        return entry

    def share(self) -> FleetState:
        """Shares the present state, as bytes."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.fleet.next_state()), type=FleetState)
        self.copy.take(state)
        return state

    @property
    def views(self) -> list[Any]:
        return self.registry.views()


def test_views_are_equal_to_the_coordinators_after_every_change() -> None:
    both = TwoProcesses()
    first, second = both.add(), both.add("http://127.0.0.1:2", cohort="c", epoch=1)
    both.share()
    assert both.views == both.membership.registry.views()
    both.membership.report(first, report(queued_s=3.0, paused=True), 1.0)
    second.drain(True)
    both.share()
    assert both.views == both.membership.registry.views()
    both.membership.check_epoch(Registration(url="http://127.0.0.1:3", cohort="c", epoch=2))
    both.membership.lose(first, "it is gone")
    both.share()
    assert both.views == both.membership.registry.views()
    assert [each.problem for each in both.registry] == ["it is gone", ""]


def test_only_workers_that_have_changed_are_told_again() -> None:
    both = TwoProcesses()
    first, second = both.add(), both.add("http://127.0.0.1:2")
    assert len(both.share().changed) == 2
    both.membership.report(second, report(), 1.0)
    assert [each.url for each in both.share().changed] == [second.url]
    assert both.share().changed == []
    whole = both.fleet.last_state()
    assert [each.url for each in whole.changed] == [first.url, second.url]


def test_a_worker_that_was_registered_again_is_another_one() -> None:
    both = TwoProcesses()
    entry = both.add()
    both.share()
    (before,) = both.registry
    both.membership.remove(entry)
    both.add()
    both.share()
    (after,) = both.registry
    assert after is not before and after.url == before.url


def test_a_process_keeps_its_own_breaker_until_another_process_is_at_the_url() -> None:
    both = TwoProcesses()
    entry = both.add()
    both.share()
    (mine,) = both.registry
    assert mine.view is not None
    broken = Breaker(state=BreakerState.OPEN, probe_at=99.0)
    mine.view = replace(mine.view, breaker=broken)
    both.membership.report(entry, report(queued_s=1.0), 1.0)
    both.share()
    assert mine.view.breaker == broken and mine.view.report == report(queued_s=1.0)
    both.membership.introduce(entry, record("any", incarnation="second"))
    both.share()
    assert mine.view.breaker == Breaker()


def test_requests_are_new_until_a_report_that_is_later() -> None:
    both = TwoProcesses()
    entry = both.add()
    both.share()
    (mine,) = both.registry
    assert mine.view is not None
    sent = both.registry.begin(Assignment(worker=mine.view, seconds=0.5, num_tokens=7, hit=0), 1.0)
    both.membership.report(entry, report(), 1.0)
    both.share()
    assert both.registry.holds.by_worker()[mine.id].new_tokens == 7
    both.membership.report(entry, report(), 1.0 + 2 * LAG_S)
    both.share()
    assert both.registry.holds.by_worker()[mine.id] == (1, 0, 0)
    both.registry.end(sent, "answered", 200, None)
    assert both.registry.num_requests() == 0


def test_the_load_of_a_foreign_worker_is_what_was_sent_there() -> None:
    both = TwoProcesses()
    entry = both.membership.add(URL)
    both.membership.introduce(entry, foreign_record(entry), is_foreign=True)
    both.membership.report(entry, foreign_report(), 0.0)
    both.share()
    (mine,) = both.registry
    assert mine.view is not None and mine.view.is_foreign and not mine.view.has_all_routes
    both.membership.note_routes(entry, has_all=True)
    both.share()
    assert mine.view.has_all_routes, "it is a router with an engine"
    both.registry.begin(Assignment(worker=mine.view, seconds=0.5, num_tokens=7, hit=0), 1.0)
    entry.drain(False)  # it is told again
    both.share()
    assert both.registry.holds.by_worker()[mine.id].new_tokens == 7


def test_a_cut_ends_the_requests_of_every_process_once() -> None:
    both = TwoProcesses()
    entry = both.add()
    both.share()
    (mine,) = both.registry
    cuts: list[tuple[str, str]] = []
    mine.upstream.abort_all = lambda end, text: cuts.append((end, text))  # type: ignore[method-assign]
    entry.cut("timeout", "it hangs")
    both.share()
    both.membership.report(entry, report(), 1.0)
    both.share()
    assert cuts == [("timeout", "it hangs")]


def test_a_pair_is_chosen_from_copies_as_both_or_not_at_all() -> None:
    both = TwoProcesses()
    prefill = both.add(role="prefill")
    both.share()
    refused = both.registry.choose(FACTS, frozenset(), 0.0)
    assert not isinstance(refused, Pair | Whole)
    both.add("http://127.0.0.1:2", role="decode")
    both.share()
    assert isinstance(both.registry.choose(FACTS, frozenset(), 0.0), Pair)
    both.membership.lose(prefill, "it is gone")
    both.share()
    assert not isinstance(both.registry.choose(FACTS, frozenset(), 0.0), Pair | Whole)
