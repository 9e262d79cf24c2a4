"""The waiting window, and the rate of arrivals that it depends on."""

from __future__ import annotations

import pytest

from segue.laps.window import FIRST_DEPTH, MAX_DEPTH, Rate, Window

BUSY = {"slack": 1.0, "rate": 1000.0, "shortest": 0.005}


def test_a_rate_is_that_of_steady_events_and_fades_without_them() -> None:
    rate = Rate()
    for number in range(1000):
        rate.add(number / 100)
    assert rate.per_second(10.0) == pytest.approx(100, rel=0.02)
    assert rate.per_second(11.0) == pytest.approx(100 / 2.718, rel=0.02)


@pytest.mark.parametrize(
    "changed",
    [
        {"rate": 1.0},
        {"rate": 190.0},
        {"shortest": 1e-4},
        {"slack": 0.0},
        {"slack": -1.0},
        {"count": FIRST_DEPTH},
    ],
    ids=str,
)
def test_there_is_no_wait_if_it_does_not_pay(changed: dict[str, float]) -> None:
    """A lone request, a rate or a step that is too low, a deadline that is near, prompts enough."""
    asked = {"count": 1} | BUSY | changed
    window = Window(0.005)
    assert window.until(now=5.0, **asked) is None  # type: ignore[arg-type]
    assert window.waited_s == 0


def test_a_window_of_no_seconds_never_waits() -> None:
    assert Window(0.0).until(1, now=5.0, **BUSY) is None


def test_a_wait_ends_in_time_and_waits_for_fewer_next_time() -> None:
    window = Window(0.005, depth=8)
    assert window.until(1, now=5.0, **BUSY) == 5.005
    assert window.until(3, now=5.003, **BUSY) == 5.005
    assert window.until(3, now=5.005, **BUSY) is None
    assert window.depth == 3 and window.waited_s == pytest.approx(0.005)


def test_a_wait_ends_early_when_enough_have_come_and_waits_for_more_next_time() -> None:
    window = Window(0.005)
    assert window.until(1, now=5.0, **BUSY) is not None
    assert window.until(2, now=5.001, **BUSY) is None
    assert window.depth == 4 and window.waited_s == pytest.approx(0.001)
    for _ in range(10):
        assert window.until(1, now=6.0, **BUSY) is not None
        assert window.until(100, now=6.001, **BUSY) is None
    assert window.depth == MAX_DEPTH


def test_the_deadline_of_the_first_prompt_ends_a_wait() -> None:
    window = Window(0.005)
    assert window.until(1, now=5.0, **BUSY | {"slack": 0.002}) == pytest.approx(5.002)


def test_a_wait_that_is_interrupted_begins_anew() -> None:
    window = Window(0.005)
    window.until(1, now=5.0, **BUSY)
    window.stop(5.001)
    window.stop(5.002)
    assert window.waited_s == pytest.approx(0.001)
    assert window.until(1, now=7.0, **BUSY) == pytest.approx(7.005)


def test_a_wait_that_nobody_ends_does_not_count_for_ever() -> None:
    """The request was aborted, or generation was paused."""
    window = Window(0.005)
    assert window.until(1, now=5.0, **BUSY) == 5.005
    assert window.until(1, now=3600.0, **BUSY) == pytest.approx(3600.005), "a new wait"
    window.stop(4000.0)
    assert window.waited_s == pytest.approx(0.01)


def test_a_rate_fades_with_its_own_memory() -> None:
    rate = Rate(2.0)
    for number in range(2000):
        rate.add(number / 100)
    assert rate.per_second(22.0) == pytest.approx(100 / 2.718, rel=0.02)


def test_one_prompt_in_two_of_the_shortest_steps_is_worth_a_wait() -> None:
    assert Window(0.02).until(1, now=5.0, slack=1.0, rate=100.0, shortest=0.005) == pytest.approx(5.02)


def test_a_wait_that_is_ended_a_little_late_is_not_begun_anew() -> None:
    window = Window(0.005)
    assert window.until(1, now=5.0, **BUSY) == 5.005
    assert window.until(1, now=5.0055, **BUSY) is None


def test_after_a_wait_for_nobody_the_next_prompt_waits_for_another_one() -> None:
    window = Window(0.005)
    window.until(1, now=5.0, **BUSY)
    assert window.until(1, now=5.005, **BUSY) is None
    assert window.until(1, now=6.0, **BUSY) == pytest.approx(6.005)
