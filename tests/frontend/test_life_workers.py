"""Tests of when the engine counts as hung, with simulated time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.frontend.life import WorkerHealth
from segue.messages.control import Heartbeat

PING_S, STALL_S, PERIOD = 5.0, 30.0, 1.0


def vitals(num_ranks: int = 1) -> WorkerHealth:
    return WorkerHealth(num_ranks, ping_s=PING_S, stall_s=STALL_S, now=1000.0)


def test_silence_of_one_rank_is_enough_and_is_named() -> None:
    health, now = vitals(num_ranks=2), 1000.0
    for _ in range(5):
        now += 1.0
        health.note(Heartbeat(0, 0.0), now)
        assert health.verdict(now) is None
    now += 0.5
    health.note(Heartbeat(0, 0.0), now)
    assert health.ages(now) == [0.0, 5.5]
    assert health.verdict(now) == "worker rank 1 has sent no heartbeat for more than 5 s (--ping-s)"
    health.note(Heartbeat(1, 0.0), now)
    assert health.verdict(now) is None


@pytest.mark.parametrize(("turn_s", "hangs"), [(30.0, False), (30.1, True)])
def test_a_step_may_take_stall_s_and_no_longer(turn_s: float, hangs: bool) -> None:
    health = vitals()
    health.note(Heartbeat(0, turn_s), 1001.0)
    said = "worker rank 0 has been at one step for more than 30 s (--stall-s)" if hangs else None
    assert health.verdict(1001.0) == said
    health.note(Heartbeat(0, 0.0), 1002.0)
    assert health.verdict(1002.0) is None


def test_time_in_which_the_frontend_did_not_run_does_not_count() -> None:
    health = vitals()
    health.note(Heartbeat(0, 29.0), 1001.0)
    assert health.verdict(9000.0) is None, "the heartbeats of that time are not read yet"
    health.note(Heartbeat(0, 0.0), 9000.1)
    assert health.verdict(9001.0) is None


def test_a_worker_that_fell_silent_while_the_frontend_did_not_run_is_found() -> None:
    health, now = vitals(), 9000.0
    while health.verdict(now) is None:
        now += PERIOD / 2
    assert now <= 9000.0 + PING_S


looks = st.lists(
    st.one_of(
        st.floats(0.0, PERIOD), st.floats(PERIOD, 1e5)
    ),  # seconds between two verdicts; in the long ones the frontend did not run
    max_size=60,
)


@given(steps=looks, comes=st.lists(st.booleans(), min_size=60, max_size=60), turn_s=st.floats(0.0, STALL_S))
def test_a_worker_with_timely_heartbeats_and_steps_never_counts_as_hung(
    steps: list[float], comes: list[bool], turn_s: float
) -> None:
    """Heartbeats are read after a verdict, at most three periods of the frontend's running time late."""
    health, now, unread = vitals(), 1000.0, 0.0
    for seconds, read in zip(steps, comes, strict=False):
        now += seconds
        unread += min(seconds, 2 * PERIOD)
        assert health.verdict(now) is None
        if read or unread > 3 * PERIOD - 1e-6:
            health.note(Heartbeat(0, turn_s), now)
            unread = 0.0


@given(
    before=looks,
    steps=st.lists(st.floats(0.01, PERIOD), min_size=1, max_size=600).filter(
        lambda steps: sum(steps) > PING_S + PERIOD
    ),
)
def test_a_silent_worker_counts_as_hung_in_time(before: list[float], steps: list[float]) -> None:
    health, now = vitals(num_ranks=2), 1000.0
    for seconds in before:
        now += seconds
        for rank in range(2):
            health.note(Heartbeat(rank, 0.0), now)
    silent_since = now
    for seconds in steps:
        now += seconds
        health.note(Heartbeat(0, 0.0), now)
        if now > silent_since + PING_S + PERIOD:
            assert health.verdict(now) is not None
        else:
            health.verdict(now)
