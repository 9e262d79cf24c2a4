"""Circuit breakers: what opens them, for how long, and what closes them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.router.breaker import (
    FAILURES,
    MOST_OPEN_S,
    NOT_A_PROBE,
    OPEN_S,
    Breaker,
    BreakerState,
    LegEnd,
    Verdict,
    judge,
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker = breaker.ended("failure", NOT_A_PROBE, now)
    return breaker


@pytest.mark.parametrize(
    ("end", "status", "code", "verdict"),
    [
        ("answered", 200, None, "success"),
        ("connect", 0, None, "failure"),
        ("timeout", 0, None, "failure"),
        ("timeout", 200, None, "failure"),
        ("cut", 200, None, "failure"),
        ("answered", 500, None, "failure"),
        ("answered", 503, "engine_hung", "failure"),
        ("answered", 503, "overloaded", "neither"),
        ("answered", 503, "paused", "neither"),
        ("answered", 503, "guide_lost", "neither"),
        ("answered", 501, "route_not_served", "neither"),
        ("answered", 400, None, "neither"),
        ("answered", 429, "overloaded", "neither"),
        ("client_left", 0, None, "neither"),
        ("client_left", 200, None, "neither"),
    ],
)
def test_what_an_end_says_about_the_worker(
    end: LegEnd, status: int, code: str | None, verdict: Verdict
) -> None:
    assert judge(end, status, code) == verdict


def test_three_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for verdict in ("failure", "failure", "success", "failure", "failure"):
        breaker = breaker.ended(verdict, NOT_A_PROBE, 0.0)
        assert breaker.why_not(0.0) is None
    breaker = breaker.ended("failure", NOT_A_PROBE, 0.0)
    assert breaker.why_not(1.0) == "its circuit breaker is open for 4.0 s more"


def test_what_says_nothing_neither_counts_nor_ends_a_row() -> None:
    breaker = Breaker()
    for verdict in ("failure", "neither", "failure", "neither", "neither", "failure"):
        breaker = breaker.ended(verdict, NOT_A_PROBE, 0.0)
    assert breaker.state is BreakerState.OPEN


def test_after_five_seconds_one_request_goes_as_a_probe() -> None:
    breaker = opened()
    assert breaker.why_not(OPEN_S - 0.01) is not None and breaker.why_not(OPEN_S) is None
    breaker, probe = breaker.admitted(OPEN_S)
    assert probe != NOT_A_PROBE
    assert breaker.why_not(OPEN_S + 100) == "its circuit breaker waits for the end of a probe"


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker, probe = opened().admitted(OPEN_S)
    breaker = breaker.ended("success", probe, 6.0)
    assert breaker.state is BreakerState.CLOSED and breaker.admitted(6.0) == (breaker, NOT_A_PROBE)
    again = opened(7.0)
    assert again.probe_at == 7.0 + OPEN_S  # the time begins anew


def test_each_probe_that_fails_makes_it_wait_longer_up_to_a_minute() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(9):
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker, probe = breaker.admitted(now)
        breaker = breaker.ended("failure", probe, now)
    assert waits[:3] == [5.0, 7.5, 11.25] and waits[-1] == MOST_OPEN_S and waits == sorted(waits)


def test_only_the_probe_decides_while_it_is_under_way() -> None:
    breaker, probe = opened().admitted(OPEN_S)
    for verdict in ("success", "failure", "neither"):
        assert breaker.ended(verdict, NOT_A_PROBE, 6.0) is breaker
        assert breaker.ended(verdict, probe - 1, 6.0) is breaker


def test_requests_sent_before_it_opened_change_nothing() -> None:
    breaker = opened()
    for verdict in ("success", "failure", "neither"):
        assert breaker.ended(verdict, NOT_A_PROBE, 1.0) is breaker


def test_if_the_probes_client_leaves_the_next_request_is_the_probe() -> None:
    breaker, probe = opened().admitted(OPEN_S)
    breaker = breaker.ended("neither", probe, 6.0)
    assert breaker.state is BreakerState.OPEN
    breaker, second = breaker.admitted(6.0)
    assert second == probe + 1
    assert breaker.ended("success", second, 6.1).state is BreakerState.CLOSED


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "success", "failure", "neither"]),
            st.integers(0, 20),
            st.sampled_from([0.0, 0.1, 3.0, 30.0]),
        ),
        max_size=60,
    )
)
def test_there_is_at_most_one_probe_and_the_worker_is_never_locked_out(
    events: list[tuple[str, int, float]],
) -> None:
    breaker, now, in_flight = Breaker(), 0.0, []
    for event, which, seconds in events:
        now += seconds
        if event == "send":
            if breaker.why_not(now) is None:
                breaker, probe = breaker.admitted(now)
                in_flight.append(probe)
        elif in_flight:
            probe = in_flight.pop(which % len(in_flight))
            breaker = breaker.ended(event, probe, now)  # type: ignore[arg-type]
        assert breaker.probe_at <= now + MOST_OPEN_S
        probes = in_flight.count(breaker.num_probes) if breaker.num_probes != NOT_A_PROBE else 0
        assert probes == (breaker.state is BreakerState.HALF_OPEN)
    for probe in in_flight:
        breaker = breaker.ended("failure", probe, now)
    assert breaker.why_not(now + MOST_OPEN_S) is None
