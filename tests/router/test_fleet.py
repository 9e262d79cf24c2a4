"""Workers as a router sees them, and the holds of requests in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.laps.cost import Coefficients
from segue.messages.fleet import WorkerReport
from segue.router.breaker import Breaker, BreakerState
from segue.router.fleet import (
    BETWEEN_HOSTS_BYTES_S,
    LAG_S,
    NOTHING_HELD,
    SAME_HOST_BYTES_S,
    Assignment,
    Held,
    Hold,
    Holds,
    WorkerView,
)
from tests.router.workers import DEVICE, record, report, view


def test_a_healthy_worker_has_nothing_against_it() -> None:
    assert view("a").why_not(1.0) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "draining"}, "it is draining"),
        ({"state": "standby"}, "it is standby"),
        ({"paused": True}, "its generation is paused"),
        ({"trouble": "its weights are poisoned"}, "its weights are poisoned"),
        ({"heartbeat_age_s": 3.5}, "its scheduler has sent no heartbeat for 3.5 s"),
        ({"epoch": 4}, "its epoch 0 was replaced by epoch 4"),
    ],
)
def test_a_report_may_say_why_a_worker_gets_nothing(fields: dict[str, Any], words: str) -> None:
    assert view("a", **fields).why_not(1.0) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"newest_epoch": 2}, "its epoch 0 was replaced by epoch 2"),
        ({"connected": False}, "its connection for reports is closed"),
        ({"is_drained": True}, "it is being drained"),
        ({"report": None}, "it has not reported yet"),
        (
            {"breaker": Breaker(state=BreakerState.HALF_OPEN)},
            "its circuit breaker waits for the end of a probe",
        ),
    ],
)
def test_what_the_router_knows_may_say_why_a_worker_gets_nothing(changes: dict[str, Any], words: str) -> None:
    assert replace(view("a"), **changes).why_not(1.0) == words


def test_a_report_of_a_lower_epoch_is_not_the_workers() -> None:
    late = view("a", record_fields={"epoch": 2}, epoch=1)
    assert late.why_not(0.0) == "it is registered with epoch 2, and reports epoch 1"


def test_another_process_epoch_identity_or_flush_is_another_cache() -> None:
    others = [
        view("a", record_fields={"incarnation": "second"}),
        view("a", epoch=1),
        view("a", version="2"),
        view("a", commits=1),
        view("a", num_flushes=1),
    ]
    assert len({view("a").cache, *(other.cache for other in others)}) == 6
    assert view("a", queued_s=3.0).cache == view("a").cache


def test_kv_is_of_one_kind_if_model_tokenizer_and_weights_are_equal() -> None:
    assert view("a", "prefill").kv_kind == view("b", "decode").kv_kind
    others = [view("b", version="2"), view("b", commits=1), view("b", record_fields={"model": "other"})]
    assert all(other.kv_kind != view("a").kv_kind for other in others)


def test_queued_seconds_shrink_for_at_most_the_period_of_the_reports() -> None:
    worker = view("a", queued_s=0.25)
    assert worker.queued_s(0.0) == 0.25
    assert worker.queued_s(0.05) == pytest.approx(0.2)
    assert worker.queued_s(2.0) == pytest.approx(0.15)
    assert WorkerView(record=record("a"), newest_epoch=0).queued_s(1.0) == 0.0


def test_the_bandwidth_of_a_pair_depends_on_whether_it_is_on_one_host() -> None:
    decode = view("d", "decode")
    assert decode.bytes_per_s_from(view("near")) == SAME_HOST_BYTES_S
    assert decode.bytes_per_s_from(view("far", record_fields={"boot_id": "other"})) == BETWEEN_HOSTS_BYTES_S


def test_a_report_survives_json_and_its_coefficients_are_those_of_the_cost_model() -> None:
    sent = report(refused={"10.0.0.1:8998": "no"}, version="7", commits=2)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=WorkerReport) == sent
    assert Coefficients(*sent.coefficients) == DEVICE
    assert len(Coefficients._fields) == len(sent.coefficients)


def assignment(worker: str = "a", seconds: float = 0.1, tokens: int = 10, of: Any = None) -> Assignment:
    return Assignment(worker=view(worker), seconds=seconds, num_tokens=tokens, hit=0, prompt_class=of)


def test_a_hold_counts_until_it_is_released_and_only_once() -> None:
    holds = Holds()
    first = holds.take(assignment(of="short"), 0.0)
    second = holds.take(assignment(seconds=0.2, of="long"), 0.0)
    assert holds.by_worker() == {"a": Held(2, 300_000, 20)}
    assert holds.pending() == {"short": 1, "long": 1}
    for _ in range(2):
        holds.release(first)
    assert holds.by_worker() == {"a": Held(1, 200_000, 10)} and holds.pending() == {"short": 0, "long": 1}
    holds.release(second)
    assert holds.by_worker() == {"a": NOTHING_HELD}


def test_a_report_knows_of_the_requests_that_were_sent_before_it_was_made() -> None:
    holds = Holds()
    old, new = holds.take(assignment(), 1.0), holds.take(assignment(seconds=0.5, tokens=7), 1.1 - LAG_S / 2)
    holds.reported("a", 1.1)
    assert holds.by_worker() == {"a": Held(2, 500_000, 7)}
    for hold in (old, new):
        holds.release(hold)
    assert holds.by_worker() == {"a": NOTHING_HELD}


def test_a_worker_that_left_drops_its_holds_and_their_release_does_not_touch_its_successors() -> None:
    holds = Holds()
    old = holds.take(assignment(of="short"), 0.0)
    holds.drop("a")
    assert holds.by_worker() == {} and holds.pending() == {"short": 0, "long": 0}
    holds.take(assignment(of="short"), 1.0)
    holds.release(old)
    assert holds.by_worker()["a"].num_requests == 1 and holds.pending()["short"] == 1


def test_a_snapshot_of_the_holds_does_not_change() -> None:
    holds = Holds()
    before = holds.by_worker()
    holds.take(assignment(), 0.0)
    assert before == {}


EVENT = st.tuples(
    st.sampled_from(["take", "take", "release", "release", "report", "drop"]),
    st.integers(0, 50),
    st.floats(0.0, 3.0),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, max_size=60))
def test_holds_return_to_nothing_in_any_order_and_are_never_negative(
    events: list[tuple[str, int, float]],
) -> None:
    holds, taken, now = Holds(), list[Hold](), 0.0
    for event, which, seconds in events:
        now += seconds / 100
        worker = "abc"[which % 3]
        if event == "take":
            of = (None, "short", "long")[which % 5 % 3]
            taken.append(holds.take(assignment(worker, seconds, which, of), now))
        elif event == "release" and taken:
            holds.release(taken[which % len(taken)])
        elif event == "report":
            holds.reported(worker, now)
        elif event == "drop":
            holds.drop(worker)
        assert all(min(held) >= 0 for held in holds.by_worker().values())
        assert min(holds.pending().values()) >= 0
    for hold in reversed(taken):
        holds.release(hold)
    assert set(holds.by_worker().values()) <= {NOTHING_HELD}
    assert set(holds.pending().values()) == {0}


def test_a_hold_that_was_never_taken_is_nothing_to_release() -> None:
    holds = Holds()
    holds.release(Hold(7, "a"))
    assert holds.by_worker() == {}
